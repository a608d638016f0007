// The search is a web worker, and browsers start none for a page that is opened as a file. There, a hidden frame runs
// its script. The offline plug-in loads a script of this name from a server of others, unless the site has its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe")
    #loaded

    constructor(url) {
      super()
      this.#frame.hidden = true
      document.body.append(this.#frame)
      const scope = this.#frame.contentWindow
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      scope.importScripts = async (...urls) => {
        for (const each of urls) await this.#load(each)
      }
      this.#loaded = this.#load(url)
    }

    postMessage(data) {
      this.#loaded.then(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    #load(url) {
      const script = this.#frame.contentDocument.createElement("script")
      script.src = new URL(url, location)
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
        this.#frame.contentDocument.head.append(script)
      })
    }
  }
}
