/**
 * Semel in the browser: a key for each write, the same key for each retry, until there is an answer.
 *
 *     import { Semel } from "/semel.js";
 *     const semel = new Semel();
 *     const { outcome, response } = await semel.send("/payments", { method: "POST", body: JSON.stringify(payment) });
 *
 * A key belongs to an intent (method and URL, or a name of yours) and its content. It is in sessionStorage before the
 * first byte is sent, and removed when a definite answer has arrived whole. So a double click, a reload and the back
 * button send the same key, and the server makes one payment. Another tab has other keys; a duplicated tab has the same.
 *
 * This module has no dependencies. Its types are in semel.d.ts.
 */

const PREFIX = "semel:";
const HEADER = "Idempotency-Key";
const KEY = /^[\x21-\x7e]{1,255}$/;
const WITHOUT_KEY = new Set(["GET", "HEAD", "OPTIONS"]);
const WITHOUT_BODY = new Set([204, 205, 304]);
const RETRIED = new Set([408, 425, 429]);
/** Refusals that servers make before they look at the key, or do not store: they do not say what an earlier attempt did. */
const NOT_STORED = new Set([401, 403, 404, 405, 407, 408, 409, 412, 421, 423, 425, 428, 429, 431, 451]);
const MOST_ENTRIES = 100;

const DEFAULTS = {
  /** Attempts of one send. */
  attempts: 8,
  /** Milliseconds of one send, with its pauses. */
  budget: 90_000,
  /** Milliseconds of one attempt. */
  timeout: 30_000,
  /** Milliseconds of the first pause and of the longest one, before the jitter. */
  firstPause: 500,
  longestPause: 20_000,
  /** Milliseconds that a key is used for: it must end before the server forgets the key. */
  ttl: 23 * 3_600_000,
};

/**
 * What an answer means: retry with the same key, or an outcome.
 *
 * `retryable` in the body comes first, then the headers that say the same, then Retry-After, then the status.
 * An error of the server that must not be retried is no definite answer: the write may have happened. Nor is a 401 after
 * an attempt without an answer (`unclear`): the login has ended, but the first attempt may have paid.
 */
export function judge(status, headers, body = "", unclear = false) {
  if (status < 400) return { retry: false, outcome: "succeeded", after: 0 };
  const problem = parse(body);
  const hints = [problem.retryable, flag(headers.get("stripe-should-retry")), flag(headers.get("x-should-retry"))];
  const after = retryAfter(headers.get("retry-after")) ?? retryAfter(problem.retry_after);
  const hint = hints.find((each) => typeof each === "boolean");
  const retry = hint ?? (after !== null || RETRIED.has(status) || status >= 500);
  const unknown = retry || status >= 500 || (unclear && NOT_STORED.has(status));
  return { retry, outcome: unknown ? "unknown" : "rejected", after: after ?? 0 };
}

/** The milliseconds of a Retry-After: seconds, or a date. Null if it says nothing that can be understood. */
export function retryAfter(value, now = Date.now()) {
  const text = String(value ?? "").trim();
  if (/^\d{1,9}$/.test(text)) return Number(text) * 1000;
  const date = /[a-z]/i.test(text) ? Date.parse(text) : NaN;
  return Number.isNaN(date) ? null : Math.max(0, date - now);
}

/**
 * A short digest of some bytes. It tells whether two contents are the same, and protects nothing: if two contents had
 * one digest, the server would refuse the second under the first one's key.
 */
export function digest(bytes) {
  const part = (seed) => {
    let [a, b] = [0xdeadbeef ^ seed, 0x41c6ce57 ^ seed];
    for (const byte of bytes) {
      a = Math.imul(a ^ byte, 2654435761);
      b = Math.imul(b ^ byte, 1597334677);
    }
    a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
    b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
    return [a, b].map((each) => (each >>> 0).toString(16).padStart(8, "0")).join("");
  };
  return part(0) + part(bytes.length + 1);
}

export class Semel {
  #settings;
  #storage;
  #inFlight = new Map();

  constructor(options = {}) {
    this.#settings = { ...DEFAULTS, ...options };
    this.#storage = new Entries(options.storage, options.onStorageFailure ?? warn);
  }

  /** Send a write, and retry it with the same key until there is an answer or the budget is spent. */
  async send(input, init = {}) {
    const { intent, onUnclear = this.#settings.onUnclear, ...rest } = init;
    if (typeof ReadableStream !== "undefined" && rest.body instanceof ReadableStream) {
      throw new TypeError("semel: a stream can be sent only once. Read it into a Blob or a string first");
    }
    const request = new Request(input, { ...(isOurs(input) ? { mode: "same-origin" } : {}), ...rest });
    if (WITHOUT_KEY.has(request.method)) throw new TypeError(`semel: ${request.method} needs no key. Use fetch`);
    const content = rest.body instanceof FormData ? await ofForm(rest.body) : await ofBytes(request);
    const name = intent ?? `${request.method} ${request.url.split("#")[0]}`;
    // From here to the entry in #inFlight nothing waits: the second of two clicks finds the first.
    const id = `${PREFIX}${name}:${content.digest}`;
    let flight = this.#inFlight.get(id);
    if (flight === undefined) {
      flight = this.#run(id, name, request, content, onUnclear).finally(() => this.#inFlight.delete(id));
      this.#inFlight.set(id, flight);
    }
    const { answer, ...result } = await flight;
    return { ...result, response: answer === null ? null : answer.response() };
  }

  /** Send a form in this way when it is submitted. Returns a function that undoes this. */
  protect(form, { onAnswer, body, headers, intent, onUnclear } = {}) {
    const submit = async (event) => {
      const by = event.submitter;
      const method = (by?.getAttribute("formmethod") ?? form.getAttribute("method") ?? "post").toUpperCase();
      if (method !== "POST") return;
      event.preventDefault();
      const url = new URL(by?.getAttribute("formaction") ?? form.getAttribute("action") ?? "", document.baseURI);
      const data = new FormData(form, by);
      const coded = body ? body(data) : form.enctype === "multipart/form-data" ? data : new URLSearchParams(data);
      form.setAttribute("aria-busy", "true");
      try {
        const name = intent ?? `form ${form.id} ${method} ${url.href}`;
        const result = await this.send(url.href, { method, body: coded, headers, intent: name, onUnclear });
        onAnswer?.(result);
      } finally {
        form.removeAttribute("aria-busy");
      }
    };
    form.addEventListener("submit", submit);
    return () => form.removeEventListener("submit", submit);
  }

  /** The writes of this tab whose outcome is not known: after a reload, or after a send that ended "unknown". */
  pending() {
    return this.#storage.all().filter((entry) => !this.#inFlight.has(entry.id)).map(shown);
  }

  /** Remove a key whose outcome the page has found out. The next send of that content is a new intent. */
  forget(key) {
    for (const entry of this.#storage.all()) if (entry.key === key) this.#storage.remove(entry.id);
  }

  /** Where keys are: "session", or "memory" where the browser has no storage for us and a reload forgets them. */
  get storage() {
    return this.#storage.kind;
  }

  async #run(id, intent, request, content, onUnclear) {
    const own = request.headers.get(HEADER);
    let entry = own === null ? this.#storage.get(id) : { key: own };
    if (entry !== null && entry.at + this.#settings.ttl < Date.now()) entry = null;
    const unclear = own === null && entry !== null;
    if (entry === null) {
      const doubts = this.#storage.all().filter((each) => each.intent === intent && this.#isInDoubt(each, id));
      if (doubts.length > 0 && (await onUnclear?.(doubts.map(shown))) === false) {
        return { key: null, outcome: "unsent", replayed: false, attempts: 0, error: null, answer: null };
      }
      entry = { id, key: newKey(), intent, at: Date.now() };
      this.#storage.set(entry);
    }
    const result = await this.#attempts(request, content, entry.key, unclear);
    if (own === null && (result.outcome === "succeeded" || result.outcome === "rejected")) this.#storage.remove(id);
    return { key: entry.key, ...result };
  }

  #isInDoubt(entry, id) {
    return entry.id === id || !this.#inFlight.has(entry.id);
  }

  async #attempts(request, content, key, unclear) {
    const { attempts, budget, firstPause, longestPause } = this.#settings;
    const end = Date.now() + budget;
    for (let attempt = 1; ; attempt++) {
      let [answer, error, meaning] = [null, null, { retry: true, after: 0, outcome: "unknown" }];
      try {
        answer = await this.#attempt(request, content, key, end);
        meaning = judge(answer.status, answer.headers, answer.text, unclear || attempt > 1);
      } catch (thrown) {
        error = thrown;
      }
      const pause = meaning.after + Math.random() * Math.min(longestPause, firstPause * 2 ** (attempt - 1));
      const over = attempt >= attempts || Date.now() + pause >= end || request.signal.aborted;
      if (!meaning.retry || over) {
        const replayed = answer !== null && answer.headers.has("idempotent-replayed");
        return { outcome: meaning.outcome, replayed, attempts: attempt, error, answer };
      }
      await sleep(pause, request.signal);
    }
  }

  async #attempt(request, content, key, end) {
    const headers = new Headers(request.headers);
    headers.set(HEADER, key);
    const { body, type } = content.encode(key);
    if (type) headers.set("Content-Type", type);
    const stop = new AbortController();
    const abort = () => stop.abort(request.signal.reason);
    const timer = setTimeout(() => stop.abort(), Math.min(this.#settings.timeout, Math.max(0, end - Date.now())));
    request.signal.addEventListener("abort", abort);
    if (request.signal.aborted) abort();
    try {
      const send = this.#settings.fetch ?? globalThis.fetch;
      const { method, mode, credentials, cache, redirect, referrerPolicy, keepalive } = request;
      const settings = { method, mode, credentials, cache, redirect, referrerPolicy, keepalive };
      const response = await send(request.url, { ...settings, headers, body, signal: stop.signal });
      // The key is kept until the whole answer is in hand: an answer that is cut off is no answer.
      return new Answer(response, await response.arrayBuffer());
    } finally {
      clearTimeout(timer);
      request.signal.removeEventListener("abort", abort);
    }
  }
}

/** An answer that has arrived whole. Every caller that waited for it gets a Response of its own. */
class Answer {
  constructor(response, bytes) {
    this.status = response.status;
    this.headers = response.headers;
    this.text = response.status < 400 ? "" : new TextDecoder().decode(bytes);
    this.response = () => {
      const { status, statusText, headers } = response;
      return new Response(WITHOUT_BODY.has(status) ? null : bytes, { status, statusText, headers });
    };
  }
}

/** The keys of this tab, in sessionStorage; in memory as far as that is refused or full, which is reported once. */
class Entries {
  kind = "session";
  #memory = new Map();
  #session = null;
  #report;

  constructor(storage, report) {
    this.#report = report;
    try {
      this.#session = storage ?? globalThis.sessionStorage;
      this.#session.getItem(PREFIX);
    } catch (error) {
      this.#fall(error);
    }
  }

  get(id) {
    return this.#memory.get(id) ?? this.#read(id);
  }

  set(entry) {
    const others = this.all().sort((one, other) => one.at - other.at);
    for (const old of others.slice(0, Math.max(0, others.length + 1 - MOST_ENTRIES))) this.remove(old.id);
    try {
      const { key, intent, at } = entry;
      if (this.#session === null) throw new Error("there is no session storage");
      this.#session.setItem(entry.id, JSON.stringify({ key, intent, at }));
    } catch (error) {
      this.#memory.set(entry.id, entry);
      this.#fall(error);
    }
  }

  remove(id) {
    this.#memory.delete(id);
    try {
      this.#session?.removeItem(id);
    } catch (error) {
      this.#fall(error);
    }
  }

  all() {
    const found = new Map(this.#memory);
    try {
      for (let i = 0; i < (this.#session?.length ?? 0); i++) {
        const id = this.#session.key(i);
        const entry = id.startsWith(PREFIX) && !found.has(id) ? this.#read(id) : null;
        if (entry !== null) found.set(id, entry);
      }
    } catch (error) {
      this.#fall(error);
    }
    return [...found.values()];
  }

  #read(id) {
    try {
      const { key, intent, at } = JSON.parse(this.#session?.getItem(id) ?? "null") ?? {};
      // What another script has spoilt is not sent: a header with a line break would make every attempt fail.
      return KEY.test(key) && typeof intent === "string" && typeof at === "number" ? { id, key, intent, at } : null;
    } catch {
      return null;
    }
  }

  #fall(error) {
    if (this.kind === "memory") return;
    this.kind = "memory";
    this.#report(error);
  }
}

async function ofBytes(request) {
  const bytes = new Uint8Array(await request.clone().arrayBuffer());
  const type = request.headers.get("Content-Type") ?? "";
  const head = new TextEncoder().encode(`${type}\n`);
  return { digest: digest(joined([head, bytes])), encode: () => ({ body: bytes.length ? bytes : null, type }) };
}

/** A multipart form. The boundary is made from the key: a browser's own differs in each attempt, and so do the bytes. */
async function ofForm(form) {
  const parts = [];
  for (const [name, value] of form) {
    const file = typeof value === "string" ? null : value;
    const quote = (text) => text.replace(/\r\n|\r|\n/g, "%0D%0A").replace(/"/g, "%22");
    const called = file === null ? "" : `; filename="${quote(file.name)}"`;
    const type = file === null ? "" : `Content-Type: ${file.type || "application/octet-stream"}\r\n`;
    const head = `Content-Disposition: form-data; name="${quote(name)}"${called}\r\n${type}\r\n`;
    const bytes = file === null ? value.replace(/\r\n|\r|\n/g, "\r\n") : new Uint8Array(await file.arrayBuffer());
    parts.push([head, bytes]);
  }
  const all = parts.flatMap(([head, bytes]) => [head, bytes, "\r\n"]).map(encoded);
  return {
    digest: digest(joined(all)),
    encode(key) {
      const boundary = `semel-${key.replace(/[^0-9A-Za-z-]/g, "-").slice(0, 60)}`;
      const lines = parts.flatMap(([head, bytes]) => [`--${boundary}\r\n`, head, bytes, "\r\n"]);
      const body = joined([...lines, `--${boundary}--\r\n`].map(encoded));
      return { body, type: `multipart/form-data; boundary=${boundary}` };
    },
  };
}

function encoded(part) {
  return typeof part === "string" ? new TextEncoder().encode(part) : part;
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((length, part) => length + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** Whether a URL is of the page's own origin. Then a redirect does not take the key to another one. */
function isOurs(input) {
  const page = globalThis.location;
  return page !== undefined && new URL(input.url ?? input, document.baseURI).origin === page.origin;
}

/** A random UUID. crypto.randomUUID exists only in secure contexts. */
function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

function shown({ key, intent, at }) {
  return { key, intent, since: new Date(at) };
}

function flag(value) {
  return value === "true" ? true : value === "false" ? false : null;
}

function parse(body) {
  try {
    return Object(JSON.parse(body));
  } catch {
    return {};
  }
}

function sleep(milliseconds, signal) {
  return new Promise((wake) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      wake();
    }
    signal.addEventListener("abort", done);
  });
}

function warn(error) {
  console.warn("semel: keys are kept in memory only, and a reload forgets them:", error);
}
