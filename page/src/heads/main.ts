/** The page of heads: panels around one state. */

import { byId } from "../shared/elements.ts";
import { themeButton } from "../shared/theme.ts";
import { alivePanel } from "./alive/alive_panel.ts";
import { oneHeadPanel } from "./one_head.ts";
import { overviewPanel } from "./overview.ts";
import { readData } from "./page_data.ts";
import { fileSources } from "./sources.ts";
import { App } from "./store.ts";
import { viewsPanel } from "./views.ts";
import { wallPanel } from "./wall.ts";

const data = readData();
const app = new App(data, fileSources(data));
themeButton(byId("theme"));
overviewPanel(app);
wallPanel(app, () => {
  performance.mark("first-picture");
  document.documentElement.dataset.ready = "true";
});
oneHeadPanel(app);
viewsPanel(app);
alivePanel(app);
