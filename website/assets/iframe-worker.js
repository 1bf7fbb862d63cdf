// Search runs in a Worker, which browsers do not start for pages opened from disk. There, this class does the same
// in a hidden frame. Material for MkDocs looks for the name IFrameWorker.
"use strict";
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
    const inside = this.frame.contentWindow, page = this.frame.contentDocument;
    page.open();
    page.write("<!doctype html><body></body>");
    page.close();
    const load = src => new Promise((resolve, reject) =>
      page.body.append(Object.assign(page.createElement("script"), { src, onload: resolve, onerror: reject })));
    inside.importScripts = (...urls) => urls.reduce((before, src) => before.then(() => load(src)), Promise.resolve());
    inside.postMessage = data => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    };
    this.ready = load(new URL(url, location.href).href);
  }

  postMessage(data) {
    const { contentWindow } = this.frame;
    this.ready.then(() => contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}
window.IFrameWorker = IFrameWorker;
if (location.protocol == "file:") window.Worker = IFrameWorker;
