// A page that is opened from a folder may start no worker, and the search is one: it runs in a hidden frame instead.
// The theme loads this file before its own scripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      // What comes before the script has run waits for it.
      this.started = new Promise(resolve => script.addEventListener("load", resolve))
      script.src = url
      frame.contentDocument.head.appendChild(script)
      this.inside = inside
    }

    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
