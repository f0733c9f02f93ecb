// The screen of requests: a row each, the latest arrival first, with its stages as a bar, and its ranks below.

import { byId, el, reconcile, setText, terms } from "./dom.js";
import { bytes, count, duration, plural } from "./format.js";

const WAYS = { queued: "waiting", placing: "being placed", prefilling: "prefilling", streaming: "generating" };
const ENDS = { length: "length", stop: "stop", cancelled: "cancelled", deadline: "deadline passed", error: "error" };

/** Call `then` when the screen's options have changed. */
export function onRequestOptions(then) {
  for (const id of ["scale", "only-open"]) byId(id).addEventListener("change", then);
}

export function showRequests(state) {
  const isOwn = byId("scale").value === "own";
  const isOnlyOpen = byId("only-open").checked;
  const shown = state.requests.filter((request) => !isOnlyOpen || request.state !== "finished");
  const longest = Math.max(1, ...shown.map((request) => request.total_ms));
  const views = shown.map((request) => ({ request, scale_ms: isOwn ? Math.max(request.total_ms, 0.001) : longest }));
  byId("no-requests").hidden = shown.length > 0;
  setText(byId("no-requests"), isOnlyOpen ? "No request waits or runs." : "No requests yet.");
  reconcile(byId("requests"), views, (view) => view.request.number, row, update);
}

function row(view) {
  const made = el(
    "li",
    { class: "request" },
    el(
      "details",
      {},
      el("summary", {}, el("span", { class: "request-head" }), el("span", { class: "track" }), el("span", { class: "request-total" })),
      el("div", { class: "request-more" }),
    ),
  );
  made.querySelector("details").addEventListener("toggle", () => more(made));
  update(made, view);
  return made;
}

function update(made, view) {
  made.view = view;
  const { request, scale_ms } = view;
  made.classList.toggle("open", request.state !== "finished");
  made.querySelector(".request-head").replaceChildren(...head(request));
  const whole = request.stages.filter((stage) => stage.rank === null);
  const track = made.querySelector(".track");
  track.replaceChildren(...whole.map((stage) => segment(stage, scale_ms)));
  setText(made.querySelector(".request-total"), duration(request.total_ms));
  more(made);
}

function head(request) {
  const level = request.error ? "bad" : request.state === "finished" ? "idle" : "busy";
  const ends = [...new Set(request.finish)].map((reason) => ENDS[reason] ?? reason).join(", ");
  const word = request.state === "finished" ? ends || "ended" : WAYS[request.state];
  const way = [request.prefill, request.generation].filter(Boolean).join(" → ");
  return [
    el("strong", {}, `#${request.number}`),
    el("span", { class: "badge", dataset: { level } }, word),
    el("span", { class: "muted" }, `${count(request.num_prompt_tokens)} in, ${count(request.num_output_tokens)} out`),
    el("span", { class: "muted way" }, way),
  ];
}

function segment(stage, scale_ms) {
  const [from, to] = [stage.from_ms, stage.to_ms].map((ms) => Math.min(Math.max(ms / scale_ms, 0), 1));
  const name = stage.name.replace("_rank", "");
  const said = `${name} ${duration(stage.to_ms - stage.from_ms)}`;
  return el("span", { class: `segment stage-${name}`, style: { "--from": `${100 * from}%`, "--part": `${100 * (to - from)}%` }, title: said });
}

/** Fill in what an open row shows besides; nothing is made for rows that are closed. */
function more(made) {
  const place = made.querySelector(".request-more");
  if (!made.querySelector("details").open) {
    place.replaceChildren();
    return;
  }
  const { request, scale_ms } = made.view;
  place.replaceChildren(
    el("dl", { class: "facts" }, ...terms(facts(request))),
    el("dl", { class: "lanes" }, ...lanes(request, scale_ms)),
    ...lines(request).map((text) => el("p", { class: "muted" }, text)),
  );
}

function facts(request) {
  const { predicted, took_ms } = request.taken;
  const found = [["first token", duration(request.first_token_ms)]];
  if (predicted) found.push(["from its placement on", duration(took_ms), `predicted ${duration(predicted.own_ms)}`]);
  if (request.num_output_tokens > 1 && request.first_token_ms !== null) {
    const between = (request.total_ms - request.first_token_ms) / (request.num_output_tokens - 1);
    found.push(["between tokens", duration(between)]);
  }
  found.push(["attempts", count(request.num_attempts), request.num_failures ? `${request.num_failures} failed` : ""]);
  if (request.num_cached_tokens) found.push(["prompt tokens cached", count(request.num_cached_tokens), `of ${count(request.num_prompt_tokens)}`]);
  if (request.taken.residency) found.push(["residency", request.taken.residency]);
  if (request.error) found.push(["error", request.error]);
  if (request.id) found.push(["id", request.id], ["tenant", request.tenant]);
  return found;
}

function lanes(request, scale_ms) {
  return request.stages.map((stage) => {
    const name = stage.rank === null ? stage.name : `rank ${stage.rank} ${stage.name.replace("_rank", "")}`;
    const took = duration(stage.to_ms - stage.from_ms);
    const lane = el("div", { class: "track" }, segment(stage, scale_ms));
    return el("div", {}, el("dt", {}, name), el("dd", {}, lane, el("span", {}, took), el("span", { class: "muted" }, note(stage))));
  });
}

function note({ name, known }) {
  if (name === "prefill_rank") return `${plural(known.tokens, "token")}, waited ${duration(known.wait_s * 1000)}`;
  if (name === "transfer_rank") return bytes(known.bytes_pushed);
  return "";
}

function lines(request) {
  const { reason, width, fetch, speculation, predicted } = request.taken;
  const found = [];
  if (reason) found.push(`prefilled ${request.taken.is_local ? "by the generation group" : "by the chain"}: ${reason.replaceAll("_", " ")}`);
  if (predicted) {
    const parts = Object.entries(predicted.parts).filter(([, ms]) => ms > 0);
    found.push(`predicted: ${parts.map(([part, ms]) => `${part} ${duration(ms)}`).join(", ") || "no time"}`);
  }
  if (width) found.push(width);
  if (fetch) found.push(fetch);
  for (const each of speculation?.sources ?? []) {
    found.push(`drafts by ${each.source}: ${count(each.num_accepted)} of ${count(each.num_drafted)} accepted`);
  }
  return found;
}
