// The logic of semel.js, without a browser. Run by test_module.py: node --test.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Semel, digest, judge, retryAfter } from "../../../src/semel/client/browser/semel.js";

const URL_ = "http://shop.example/payments";

class FakeStorage {
  constructor(most = Infinity) {
    this.map = new Map();
    this.most = most;
  }
  get length() {
    return this.map.size;
  }
  key(i) {
    return [...this.map.keys()][i];
  }
  getItem(name) {
    return this.map.get(name) ?? null;
  }
  setItem(name, value) {
    if (this.map.size >= this.most) throw new Error("QuotaExceededError");
    this.map.set(name, value);
  }
  removeItem(name) {
    this.map.delete(name);
  }
}

/** A tab: what it sends is in `sent`, and `answers` are taken in turn (the last one stays). */
function tab(answers, options = {}) {
  const sent = [];
  const storage = options.storage ?? new FakeStorage();
  const fetch = async (url, init) => {
    const body = init.body === null ? "" : new TextDecoder().decode(init.body);
    sent.push({ url, key: init.headers.get("Idempotency-Key"), type: init.headers.get("Content-Type"), body });
    const answer = answers.length > 1 ? answers.shift() : answers[0];
    if (answer instanceof Error) throw answer;
    return typeof answer === "function" ? answer(init) : new Response(answer.body ?? null, answer);
  };
  const semel = new Semel({ firstPause: 1, longestPause: 2, storage, fetch, ...options });
  return { semel, sent, storage };
}

const pay = (semel, body = "{}", init = {}) => semel.send(URL_, { method: "POST", body, ...init });
const lost = new TypeError("failed to fetch");
const problem = (status, retryable) => ({ status, body: JSON.stringify({ retryable }) });

for (const [status, headers, body, unclear, retry, outcome] of [
  [201, {}, "", false, false, "succeeded"],
  [303, {}, "", false, false, "succeeded"],
  [202, { "retry-after": "1" }, "", false, false, "succeeded"],
  [400, {}, "", false, false, "rejected"],
  [402, {}, "no JSON", true, false, "rejected"],
  [422, {}, "[]", true, false, "rejected"],
  [401, {}, "", false, false, "rejected"],
  [401, {}, "", true, false, "unknown"],
  [403, {}, "null", true, false, "unknown"],
  [404, {}, "", false, false, "rejected"],
  [404, {}, "", true, false, "unknown"], // such as a proxy without a service behind it
  [405, {}, "", true, false, "unknown"],
  [408, {}, "", false, true, "unknown"],
  [425, {}, "", false, true, "unknown"],
  [429, {}, "", false, true, "unknown"],
  [500, {}, "", false, true, "unknown"],
  [503, {}, "", false, true, "unknown"],
  [409, {}, "", false, false, "rejected"],
  [409, { "retry-after": "1" }, "", false, true, "unknown"],
  [409, {}, '{"retryable": true}', false, true, "unknown"],
  [409, { "retry-after": "1" }, '{"retryable": false}', false, false, "rejected"],
  [500, {}, '{"retryable": false}', false, false, "unknown"],
  [429, { "x-should-retry": "false" }, "", false, false, "rejected"],
  [400, { "stripe-should-retry": "true" }, "", false, true, "unknown"],
  [400, { "x-should-retry": "true" }, '{"retryable": false}', false, false, "rejected"],
  [400, { "x-should-retry": "perhaps" }, '{"retryable": "yes"}', false, false, "rejected"],
]) {
  test(`${status} ${JSON.stringify(headers)} ${body} unclear=${unclear}`, () => {
    const found = judge(status, new Headers(headers), body, unclear);
    assert.deepEqual([found.retry, found.outcome], [retry, outcome]);
  });
}

test("Retry-After is seconds or a date", () => {
  const now = Date.parse("Tue, 01 Jan 2030 00:00:00 GMT");
  assert.equal(retryAfter("7", now), 7000);
  assert.equal(retryAfter(2, now), 2000);
  assert.equal(retryAfter("Tue, 01 Jan 2030 00:00:05 GMT", now), 5000);
  assert.equal(retryAfter("Mon, 31 Dec 2029 00:00:00 GMT", now), 0);
  for (const nonsense of [null, undefined, "", "soon", "-1", "1.5", "99999999999999"]) {
    assert.equal(retryAfter(nonsense, now), null);
  }
});

test("every retry has the same key and the same bytes, and an answer clears the key", async () => {
  const { semel, sent, storage } = tab([lost, problem(409, true), problem(503), { status: 201, body: "made" }]);
  const result = await pay(semel, "order");
  assert.deepEqual([result.outcome, result.attempts, await result.response.text()], ["succeeded", 4, "made"]);
  assert.equal(new Set(sent.map((each) => each.key + each.body)).size, 1);
  assert.match(sent[0].key, /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  assert.equal(storage.length, 0);
  await pay(semel, "order");
  assert.notEqual(sent.at(-1).key, sent[0].key);
});

test("Retry-After is a floor", async () => {
  const { semel, sent } = tab([{ status: 503, headers: { "Retry-After": "60" } }], { budget: 5000 });
  const result = await pay(semel);
  assert.deepEqual([result.outcome, result.response.status, sent.length], ["unknown", 503, 1]);
});

test("the key survives a reload, and a new tab has another", async () => {
  const first = tab([lost], { attempts: 2 });
  assert.equal((await pay(first.semel, "a")).outcome, "unknown");
  assert.equal(first.semel.pending()[0].key, first.sent[0].key);
  const again = tab([{ status: 201 }], { storage: first.storage });
  assert.equal((await pay(again.semel, "a")).key, first.sent[0].key);
  assert.deepEqual(again.semel.pending(), []);
  const other = tab([{ status: 201 }]);
  assert.notEqual((await pay(other.semel, "a")).key, first.sent[0].key);
});

test("two clicks share one request, and each gets a response to read", async () => {
  const { semel, sent } = tab([{ status: 201, body: "made" }]);
  const results = await Promise.all([pay(semel), pay(semel), pay(semel, "other")]);
  assert.deepEqual(await Promise.all(results.map((each) => each.response.text())), ["made", "made", "made"]);
  assert.equal(sent.length, 2);
  assert.equal(results[0].key, results[1].key);
  assert.notEqual(results[0].key, results[2].key);
});

test("changed content after an unclear failure: a new key, and the page hears of the old one", async () => {
  const { semel, sent, storage } = tab([lost], { attempts: 1 });
  const { key } = await pay(semel, "10");
  const heard = [];
  const second = tab([{ status: 201 }], { storage, onUnclear: (doubts) => void heard.push(...doubts) });
  const result = await pay(second.semel, "20");
  assert.equal(result.outcome, "succeeded");
  assert.notEqual(result.key, key);
  assert.deepEqual(heard.map((each) => [each.key, each.intent]), [[key, `POST ${URL_}`]]);
  assert.equal((await pay(second.semel, "10")).key, key); // the first content still has its key
  assert.equal(heard.length, 1);
  assert.equal(sent[0].key, key);
});

test("the page can refuse to send changed content, and can forget a key that it has reconciled", async () => {
  const { semel, sent } = tab([lost, { status: 201 }], { attempts: 1, onUnclear: async () => false });
  const { key } = await pay(semel, "10");
  const refused = await pay(semel, "20");
  assert.deepEqual([refused.outcome, refused.key, refused.response, sent.length], ["unsent", null, null, 1]);
  semel.forget(key);
  assert.equal((await pay(semel, "20")).outcome, "succeeded");
});

test("two different writes at the same time are not in doubt", async () => {
  const heard = [];
  const { semel } = tab([{ status: 201 }], { onUnclear: (doubts) => void heard.push(doubts) });
  await Promise.all([pay(semel, "1"), pay(semel, "2"), pay(semel, "3")]);
  assert.deepEqual(heard, []);
});

test("a key that the server may have forgotten is not sent again without a word", async () => {
  const { semel, storage } = tab([lost], { attempts: 1 });
  const { key } = await pay(semel);
  const heard = [];
  const late = tab([{ status: 201 }], { storage, ttl: -1, onUnclear: (doubts) => void heard.push(...doubts) });
  assert.notEqual((await pay(late.semel)).key, key);
  assert.deepEqual(heard.map((each) => each.key), [key]);
});

test("a definite refusal clears the key, one that says nothing of an earlier attempt does not", async () => {
  const refused = tab([{ status: 402 }]);
  assert.equal((await pay(refused.semel)).outcome, "rejected");
  assert.equal(refused.storage.length, 0);
  const login = tab([lost, { status: 401 }]);
  const { outcome, key } = await pay(login.semel);
  assert.deepEqual([outcome, login.semel.pending()[0].key], ["unknown", key]);
  const later = tab([{ status: 403 }], { storage: login.storage }); // also after a reload
  assert.equal((await pay(later.semel)).outcome, "unknown");
});

test("an answer that is cut off is no answer", async () => {
  const cut = () => {
    const body = new ReadableStream({
      pull(controller) {
        controller.error(new TypeError("network error"));
      },
    });
    return new Response(body, { status: 201 });
  };
  const { semel, sent } = tab([cut, { status: 201, headers: { "Idempotent-Replayed": "true" } }]);
  const result = await pay(semel);
  assert.deepEqual([result.outcome, result.replayed, sent.length], ["succeeded", true, 2]);
  assert.equal(sent[0].key, sent[1].key);
});

test("a cancelled send is unknown, and its key stays", async () => {
  const stop = new AbortController();
  const never = (init) => new Promise((_, refuse) => init.signal.addEventListener("abort", () => refuse(lost)));
  const { semel, sent } = tab([never]);
  const sending = pay(semel, "{}", { signal: stop.signal });
  while (sent.length === 0) await new Promise(setImmediate);
  stop.abort();
  assert.equal((await sending).outcome, "unknown");
  assert.equal(semel.pending()[0].key, sent[0].key);
});

test("an attempt without an answer is given up in time", async () => {
  const never = (init) => new Promise((_, refuse) => init.signal.addEventListener("abort", () => refuse(lost)));
  const { semel, sent } = tab([never, { status: 201 }], { timeout: 1 });
  assert.equal((await pay(semel)).outcome, "succeeded");
  assert.equal(sent[0].key, sent[1].key);
});

test("storage that is refused or full: keys are in memory, and the page hears of it once", async () => {
  for (const storage of [new FakeStorage(0), { getItem: () => { throw new Error("SecurityError"); } }]) {
    const heard = [];
    const options = { storage, attempts: 1, onStorageFailure: (error) => heard.push(error) };
    const { semel, sent } = tab([lost, lost, { status: 201 }], options);
    for (const _ of [1, 2, 3]) await pay(semel);
    assert.equal(new Set(sent.map((each) => each.key)).size, 1);
    assert.deepEqual([semel.storage, heard.length, semel.pending().length], ["memory", 1, 0]);
  }
});

test("a spoilt entry is not sent", async () => {
  const { semel, storage, sent } = tab([lost], { attempts: 1 });
  await pay(semel);
  const [id] = storage.map.keys();
  for (const spoilt of ["", "{", "null", "7", '{"key":"a\\nb","intent":"x","at":1}', '{"key":"k"}']) {
    storage.map.set(id, spoilt);
    await pay(semel);
    assert.match(sent.at(-1).key, /^[0-9a-f-]{36}$/);
  }
});

test("the storage is bounded: the oldest keys go", async () => {
  const { semel, storage } = tab([lost], { attempts: 1 });
  for (let i = 0; i < 105; i++) await pay(semel, String(i), { intent: `order ${i}` });
  assert.equal(storage.length, 100);
});

test("a key of the caller's own is sent as it is, and not stored", async () => {
  const { semel, sent, storage } = tab([lost, { status: 201 }]);
  await pay(semel, "{}", { headers: { "Idempotency-Key": "order-7" } });
  assert.deepEqual([sent.map((each) => each.key), storage.length], [["order-7", "order-7"], 0]);
});

test("a multipart form has the same bytes in every attempt, also after a reload", async () => {
  const form = () => {
    const data = new FormData();
    data.append('a "b"', "one\ntwo");
    data.append("file", new File([new Uint8Array([0, 255, 10])], "x.bin", { type: "application/x" }));
    return data;
  };
  const { semel, sent, storage } = tab([lost], { attempts: 2 });
  await pay(semel, form());
  const again = tab([{ status: 201 }], { storage });
  await pay(again.semel, form());
  const all = [...sent, ...again.sent];
  assert.equal(all.length, 3);
  assert.equal(new Set(all.map((each) => [each.key, each.type, each.body].join())).size, 1);
  const raw = await new Response(all[0].body, { headers: { "Content-Type": all[0].type } }).formData();
  assert.equal(raw.get('a "b"') ?? raw.get("a %22b%22"), "one\r\ntwo");
  assert.equal(raw.get("file").name, "x.bin");
});

test("what cannot be sent twice is refused before it is sent", async () => {
  const { semel, sent } = tab([{ status: 201 }]);
  const stream = new ReadableStream();
  await assert.rejects(pay(semel, stream, { duplex: "half" }), /only once/);
  await assert.rejects(semel.send(URL_), /GET needs no key/);
  await assert.rejects(semel.send("http://", { method: "POST" }), TypeError);
  assert.deepEqual([sent.length, semel.pending().length], [0, 0]);
});

test("a digest tells contents apart", () => {
  const texts = ["", "a", "b", "ab", "ba", "\0", "\0\0", "x".repeat(1000), "x".repeat(1001)];
  const found = texts.map((text) => digest(new TextEncoder().encode(text)));
  assert.equal(new Set(found).size, texts.length);
  for (const each of found) assert.match(each, /^[0-9a-f]{32}$/);
});
