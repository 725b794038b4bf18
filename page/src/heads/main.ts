/** The page of heads: panels around one state. */

import { byId } from "../shared/elements.ts";
import { themeButton } from "../shared/theme.ts";
import { alivePanel } from "./alive/alive_panel.ts";
import { readData } from "./page_data.ts";
import { fileSources } from "./sources.ts";
import { App } from "./store.ts";

const data = readData();
const app = new App(data, fileSources(data));
byId("heading").textContent = data.heading;
themeButton(byId("theme"));
document.documentElement.dataset.ready = "true";
alivePanel(app);
