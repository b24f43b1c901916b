// The search of the site runs in a worker, which browsers do not start for pages that are opened from a folder (file:).
// There, this class takes its place: the script of the worker runs in a hidden frame of the page.

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      const load = (url) => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        inside.document.head.append(script);
      });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce((loaded, url) => loaded.then(() => load(url)), Promise.resolve());
      const ready = load(new URL(address, location.href).href);
      this.postMessage = (data) => ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
