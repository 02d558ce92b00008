// The buttons of the demo. They act as clients do: the same key until the outcome is known.
import { Semel } from "/semel.js";

const log = document.getElementById("log");
const semel = new Semel({ firstPause: 300, attempts: 12 });
const headers = { Authorization: "Bearer sk_alice", "Content-Type": "application/json" };
const MOST_LINES = 6;

const body = (simulate) =>
  JSON.stringify({ amount: 100 + Math.floor(Math.random() * 9900), currency: "EUR", customer: crypto.randomUUID(), simulate });

/** Add a line, with a link to the story of its key. */
async function say(text, key) {
  const line = document.createElement("li");
  line.textContent = text + " ";
  log.prepend(line);
  while (log.children.length > MOST_LINES) log.lastElementChild.remove();
  if (key === undefined) return line;
  const fields = { form: log.dataset.form, key, operation: "POST /payments", tenant: "alice" };
  const found = await fetch("/search", {
    method: "POST", headers: { Accept: "application/json" }, body: new URLSearchParams(fields),
  });
  if (found.ok) {
    const link = document.createElement("a");
    link.href = (await found.json()).location;
    link.textContent = "its story";
    line.append(link);
  }
  return line;
}

async function pay() {
  const { outcome, key } = await semel.send("/payments", { method: "POST", headers, body: body() });
  await say(outcome === "succeeded" ? "Paid." : `The outcome: ${outcome}.`, key);
}

async function twice() {
  const key = crypto.randomUUID();
  const content = body({ delay_ms: 50 });
  const send = () => fetch("/payments", { method: "POST", headers: { ...headers, "Idempotency-Key": key }, body: content });
  const first = await send();
  const second = await send();
  const same = (await first.text()) === (await second.text());
  const replayed = second.headers.get("Idempotent-Replayed") === "true";
  await say(
    replayed && same
      ? "Sent twice, paid once: the second request got the stored answer, byte for byte."
      : `Sent twice: ${first.status}, then ${second.status}.`,
    key,
  );
}

async function kill() {
  const waiting = await say("A worker was told to die after it has paid, before it answers. The client tries again …");
  const { outcome, attempts, key } = await semel.send("/payments", {
    method: "POST", headers, body: body({ crash: "after" }),
  });
  waiting.remove();
  await say(
    outcome === "succeeded"
      ? `The worker died in the middle. Request ${attempts} of the client found the payment: one was made.`
      : `The outcome: ${outcome}.`,
    key,
  );
}

for (const [id, act] of Object.entries({ once: pay, twice, kill })) {
  const button = document.getElementById(id);
  button.addEventListener("click", async () => {
    button.setAttribute("aria-busy", "true");
    try {
      await act();
    } catch (error) {
      await say(`The service did not answer: ${error.message}`);
    } finally {
      button.removeAttribute("aria-busy");
    }
  });
}
document.documentElement.dataset.ready = "true";
