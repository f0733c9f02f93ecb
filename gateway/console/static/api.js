// Calls to the gateway: the cluster's state, and streams of tokens. The API key is kept in sessionStorage alone.

const KEY = "baton-api-key";

/** An answer that is an error, in the server's own words. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function givenKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The cluster, its requests and the served model. Throws a ServerError, or a TypeError when the gateway is away. */
export async function fetchState() {
  const answer = await fetch("api/state", { headers: callersHeaders(), cache: "no-store" });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

/**
 * Ask for a stream, and yield its events as `[name, data]`. Aborting the signal cancels the request on the server. An
 * event named "error" is thrown as a ServerError.
 */
export async function* stream(path, body, signal) {
  const headers = { ...callersHeaders(), "content-type": "application/json" };
  const answer = await fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) yield parsed(event);
  }
}

function parsed(event) {
  const fields = Object.fromEntries(event.split("\n").map((line) => splitOnce(line, ": ")));
  const data = JSON.parse(fields.data);
  if (fields.event === "error") throw new ServerError(200, data.error.message);
  return [fields.event, data];
}

function splitOnce(text, mark) {
  const at = text.indexOf(mark);
  return [text.slice(0, at), text.slice(at + mark.length)];
}

function callersHeaders() {
  const key = givenKey();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refusal(answer) {
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    message += ": the answer came from no Baton gateway";
  }
  return new ServerError(answer.status, message);
}
