/** The page of heads: panels around one state. */

import { byId } from "../shared/elements.ts";
import { themeButton } from "../shared/theme.ts";
import { PageEngine } from "./alive/page_engine.ts";
import { livePanel } from "./live_panel.ts";
import { oneHeadPanel } from "./one_head.ts";
import { overviewPanel } from "./overview.ts";
import { readData } from "./page_data.ts";
import { ServedEngine } from "./served/served_engine.ts";
import { fileSources } from "./sources.ts";
import { App } from "./store.ts";
import { viewsPanel } from "./views.ts";
import { wallPanel } from "./wall.ts";

const data = readData();
const served = data.served ? new ServedEngine(data.served) : null;
const app = new App(data, served === null ? fileSources(data) : [served.shown]);
themeButton(byId("theme"));
overviewPanel(app);
wallPanel(app, () => {
  performance.mark("first-picture");
  document.documentElement.dataset.ready = "true";
});
oneHeadPanel(app);
viewsPanel(app);
if (served !== null) {
  livePanel(app, served);
  app.on((changed) => {
    if (changed.has("layer") || changed.has("head"))
      served.connection.select(app.state.layer, app.state.head);
  });
} else if (data.alive !== null) livePanel(app, new PageEngine(data.alive, data.labels, app.sources));
