// A browser starts no worker in a page that was opened from a folder. There a hidden frame runs the script of
// the search instead, with the messages of a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.started = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = url;
          script.addEventListener("load", () => resolve(inside));
          inside.document.body.append(script);
        }, { once: true });
      });
      document.documentElement.append(frame);
    }

    postMessage(data) {
      this.started.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
