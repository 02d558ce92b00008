// Keeps the live part of a page up to date. Without this script the page works too: it is only not live.
// Nothing moves unless data did: nodes that are equal stay, with their focus and their selection.

const part = document.getElementById("live");
const sign = document.getElementById("live-sign");
const base = document.documentElement.dataset.base;
let source = null;

function say(text, on) {
  if (sign !== null) {
    sign.textContent = text;
    sign.toggleAttribute("data-on", on);
  }
}

/** The children that are seen: space between elements is none of them. */
const children = (node) => [...node.childNodes].filter((each) => each.nodeType !== Node.TEXT_NODE || each.data.trim() !== "");

/** Make the children of `now` equal to those of `next`, and touch only what differs. */
function follow(now, next) {
  const old = children(now);
  const fresh = children(next);
  fresh.forEach((child, at) => {
    const there = old[at];
    if (there === undefined) {
      now.append(child);
    } else if (!there.isEqualNode(child)) {
      const alike = there.nodeType === Node.ELEMENT_NODE && there.nodeName === child.nodeName;
      if (alike && there.namespaceURI !== "http://www.w3.org/2000/svg") {
        for (const { name } of [...there.attributes]) {
          if (!child.hasAttribute(name)) there.removeAttribute(name);
        }
        for (const { name, value } of child.attributes) {
          if (there.getAttribute(name) !== value) there.setAttribute(name, value);
        }
        follow(there, child);
      } else {
        there.replaceWith(child);
      }
    }
  });
  old.slice(fresh.length).forEach((child) => child.remove());
}

function show(html) {
  const next = document.createElement("template");
  next.innerHTML = html;
  follow(part, next.content);
}

function open() {
  if (source !== null || document.hidden) return;
  const of = location.pathname.slice(base.length) + location.search;
  source = new EventSource(`${base}/live?of=${encodeURIComponent(of || "/")}`);
  source.addEventListener("open", () => say("live", true));
  source.addEventListener("message", (event) => {
    show(JSON.parse(event.data));
    say("live", true);
  });
  source.addEventListener("trouble", () => say("the store does not answer", false));
  source.addEventListener("error", () => {
    say("reconnecting", false);
    if (source !== null && source.readyState === EventSource.CLOSED) {
      source = null;
      openAgain();
    }
  });
}

/** The server refused the stream. If the session has ended, the page shows where to sign in. */
async function openAgain() {
  const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
  if (answer?.status === 401) location.reload();
  else setTimeout(open, 5000);
}

function close() {
  source?.close();
  source = null;
  say("paused", false);
}

if (part !== null) {
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();
}
