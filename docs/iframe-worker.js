// Search from disk: a browser refuses a Worker to pages that are opened as files. The theme's worker then runs in a frame
// that nobody sees. The theme would fetch such a stand-in from the network; finding this one by its name, it does not.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const home = new URL(address, document.baseURI);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const load = (url) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = new URL(url, home);
          script.onload = done;
          script.onerror = failed;
          inside.document.head.appendChild(script);
        });
      inside.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame = frame;
      this.loaded = load(home);
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
