// The playground: asks for a completion or a chat, shows the answer as it comes, and can stop it.

import { ServerError, stream } from "./api.js";
import { byId, el, setText, terms } from "./dom.js";
import { count, duration, plural, rate } from "./format.js";
import { askForKey } from "./key.js";
import { Tokens, visible } from "./tokens.js";

const OPTIONAL = ["top_p", "top_k"];
const form = byId("ask");
const messages = []; // of the chat so far
let running = null; // the AbortController of the answer that comes
let isModeChosen = false;

/** Offer chats where the model has a template for them; called with each state. */
export function showModel(state) {
  const { has_chats } = state.model;
  for (const radio of form.elements.mode) if (radio.value === "chat") radio.disabled = !has_chats;
  if (!isModeChosen) form.elements.mode.value = has_chats ? "chat" : "completion";
  isModeChosen = true;
  form.elements.max_tokens.max = state.model.max_tokens;
}

/** Stop the answer that comes, if one does; its request is cancelled on the server. */
export function stopAnswer() {
  running?.abort();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) answer();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
byId("stop").addEventListener("click", stopAnswer);
byId("clear").addEventListener("click", () => {
  stopAnswer();
  messages.length = 0;
  byId("turns").replaceChildren();
  byId("outcome").hidden = true;
  byId("refusal").hidden = true;
  setText(byId("progress"), "Nothing asked yet.");
  byId("prompt").focus();
});

async function answer() {
  const isChat = form.elements.mode.value === "chat";
  const prompt = form.elements.prompt.value;
  const turn = new Turn(prompt, isChat);
  const body = sampling();
  if (isChat) body.messages = [...messages, { role: "user", content: prompt }];
  else body.prompt = prompt;
  begin();
  try {
    for await (const [name, data] of stream(isChat ? "chat" : "completion", body, running.signal)) turn.take(name, data);
    setText(byId("progress"), turn.summary());
  } catch (error) {
    failed(error, turn);
  }
  finish();
  if (isChat && turn.text) {
    messages.push({ role: "user", content: prompt }, { role: "assistant", content: turn.text });
    form.elements.prompt.value = "";
  }
}

function begin() {
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("refusal").hidden = true;
  byId("turns").setAttribute("aria-busy", "true"); // read out once it is whole
  setText(byId("progress"), "Waiting for the first token.");
}

function finish() {
  const hadFocus = document.activeElement === byId("stop");
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
  if (hadFocus) byId("send").focus();
  byId("turns").setAttribute("aria-busy", "false");
}

function failed(error, turn) {
  if (error.name === "AbortError") {
    setText(byId("progress"), `Stopped after ${plural(turn.tokens.list.length, "token")}.`);
    turn.stopped();
    return;
  }
  const isServers = error instanceof ServerError;
  if (!isServers && !(error instanceof TypeError)) throw error; // a defect of this page: to the browser's console
  const refusal = byId("refusal");
  refusal.hidden = false;
  setText(refusal, isServers ? error.message : "The gateway does not answer, or was lost.");
  setText(byId("progress"), "Not answered.");
  if (error.status === 401) askForKey(error.message);
}

function sampling() {
  const fields = form.elements;
  const body = {
    max_tokens: Number(fields.max_tokens.value),
    temperature: Number(fields.temperature.value),
    priority: fields.priority.value,
    ignore_eos: fields.ignore_eos.checked,
  };
  for (const name of OPTIONAL) if (fields[name].value !== "") body[name] = Number(fields[name].value);
  if (fields.seed.value) body.seed = fields.seed.value; // as text: 64 bits are more than a number holds
  if (fields.stop.value) body.stop = fields.stop.value;
  return body;
}

/** One question and its answer, as they are shown. */
class Turn {
  tokens = new Tokens();
  text = "";
  #spans = [];
  #rows = [];
  #request = null;
  #end = null;
  #finish = "";

  constructor(prompt, isChat) {
    this.place = el("p", { class: "answer" });
    const asked = el("p", { class: "question" }, prompt);
    const [asks, answers] = isChat ? ["You", "Model"] : ["Prompt", "Completion"];
    if (!isChat) byId("turns").replaceChildren();
    byId("turns").append(el("article", { class: "turn" }, el("h3", {}, asks), asked, el("h3", {}, answers), this.place));
    byId("token-rows").replaceChildren();
    byId("outcome").hidden = true;
  }

  take(name, data) {
    if (name === "begin") this.#begun(data);
    else if (name === "token") this.#token(data);
    else if (name === "end") this.#ended(data);
  }

  stopped() {
    this.place.append(el("span", { class: "muted" }, " (stopped)"));
    this.#tell();
  }

  summary() {
    const [list, usage] = [this.tokens.list, this.#end?.usage];
    const seconds = list.length > 1 ? (list.at(-1).at_ms - list[0].at_ms) / 1000 : 0;
    const speed = seconds > 0 ? `, ${rate((list.length - 1) / seconds)} tokens/s` : "";
    return `Done: ${plural(usage?.num_output_tokens ?? list.length, "token")}${speed}, ended by ${this.#finish || "its end"}.`;
  }

  #begun(data) {
    this.#request = data;
    setText(byId("progress"), "Answering.");
  }

  #token(event) {
    const changed = this.tokens.take(event);
    if (event.id !== null) {
      this.#spans.push(el("span", {}, event.text));
      this.#rows.push(el("tr"));
      this.place.append(this.#spans.at(-1));
      byId("token-rows").append(this.#rows.at(-1));
    } else if (event.text) {
      this.place.append(event.text);
    }
    for (const token of changed) this.#show(token);
    this.text += event.text;
    this.#finish = event.finish ?? this.#finish;
    byId("outcome").hidden = false;
  }

  #show(token) {
    const place = this.tokens.list.indexOf(token);
    this.#spans[place].className = `token from-${token.kind}`;
    this.#spans[place].title = `${token.group}: ${token.how}`;
    const [predicted, taken] = [token.predicted_ms, token.taken_ms].map((ms) => (ms === null ? "" : ms.toFixed(1)));
    const cells = [visible(token), token.group, token.step ? `${token.step}: ${token.how}` : token.how, predicted, taken];
    this.#rows[place].className = `from-${token.kind}`;
    this.#rows[place].replaceChildren(el("th", { scope: "row" }, String(token.index)), ...cells.map((text) => el("td", {}, text)));
  }

  #ended(data) {
    this.#end = data;
    const { taken, first_token_ms, received_ms } = data;
    if (taken && this.tokens.list.length) {
      this.tokens.first(taken.predicted?.own_ms ?? null, taken.took_ms ?? first_token_ms - received_ms);
      this.#show(this.tokens.list[0]);
    }
    this.#tell();
  }

  #tell() {
    const { prefill, step, draft } = this.tokens.counts();
    const found = [["from a prefill rank", count(prefill)], ["from steps", count(step)], ["accepted drafts", count(draft)]];
    const [taken, usage] = [this.#end?.taken, this.#end?.usage];
    if (usage) found.push(["prompt tokens", count(usage.num_prompt_tokens), usage.num_cached_tokens ? `${count(usage.num_cached_tokens)} cached` : ""]);
    if (taken) {
      const said = taken.predicted ? `predicted ${duration(taken.predicted.own_ms)}` : "";
      found.push(["placement to first token", duration(taken.took_ms), said]);
      if (taken.reason) found.push(["prefilled", taken.is_local ? "by the generation group" : "by a chain", taken.reason.replaceAll("_", " ")]);
    }
    if (this.#request) found.push(["seed", this.#request.seed ?? "-"], ["exact", this.#request.exact ? "yes" : "no"], ["id", this.#request.id]);
    byId("taken").replaceChildren(...terms(found));
    byId("outcome").hidden = false;
  }
}
