// The screen of the cluster: both pools, each group with its slots or ranks, whether it gets work, and its rates.

import { byId, el, reconcile, stackedBar, terms } from "./dom.js";
import { bytes, count, duration, plural, rate, share } from "./format.js";
import { jobsDone, median } from "./rates.js";

const WORDS = {
  yes: ["ready", "good"],
  no: ["not ready", "bad"],
  draining: ["draining", "fair"],
  drained: ["drained", "fair"],
  broken: ["broken", "bad"],
};
const MOST_SQUARES = 64;

export function showCluster(state, rates) {
  byId("totals").replaceChildren(...terms(totals(state, rates)));
  reconcile(byId("notices"), notices(state), (notice) => notice[1], ([level, text]) => el("li", { class: `notice ${level}` }, text));
  const prefill = state.groups.filter((group) => group.role === "prefill");
  const generate = state.groups.filter((group) => group.role === "generate");
  byId("no-prefill").hidden = prefill.length > 0;
  const shownPrefill = prefill.map((group) => ({ group, rate: rates.jobs(group.name) }));
  const shownGenerate = generate.map((group) => ({ group, rate: rates.steps(group.name) }));
  reconcile(byId("prefill-groups"), shownPrefill, (each) => each.group.name, prefillCard);
  reconcile(byId("generate-groups"), shownGenerate, (each) => each.group.name, generationCard);
}

function totals(state, rates) {
  const firsts = state.requests.map((request) => request.first_token_ms).filter((ms) => ms !== null);
  const found = [
    ["queued", count(state.num_queued), state.num_queued ? plural(state.num_queued_tokens, "token") : ""],
    ["running", count(state.num_running)],
    ["requests/s", rate(rates.ended())],
    ["output tokens/s", rate(rates.tokens())],
    ["first token, median", duration(median(firsts)), firsts.length ? `of ${firsts.length}` : ""],
  ];
  if (state.num_degraded) found.push(["prefilled without a ready chain", count(state.num_degraded)]);
  return found;
}

function notices(state) {
  const found = state.why_not_serving.map((why) => ["bad", `not serving: ${why}`]);
  found.push(...state.why_degraded.map((why) => ["fair", why]));
  if (state.groups_away.length) found.push(["plain", `let go by operators: ${state.groups_away.join(", ")}`]);
  if (state.scaling) found.push(["plain", `autoscaling, ${state.scaling}`]);
  return found;
}

function head(group) {
  const [word, level] = WORDS[group.readiness] ?? [group.readiness, "fair"];
  const name = group.lender ? `${group.name} (worker of ${group.lender})` : group.name;
  return el(
    "div",
    { class: "group-head" },
    el("h4", {}, name),
    el("span", { class: "badge", dataset: { level } }, word),
  );
}

function trouble(group) {
  const found = [group.imbalance, ...group.ranks.map((rank) => rank.trouble && `rank ${rank.rank}: ${rank.trouble}`)];
  if (group.num_leaked) found.push(`${plural(group.num_leaked, "slot or job")} leaked`);
  if (group.is_silent) found.push("the worker does not answer");
  const lines = found.filter(Boolean).map((text) => el("li", {}, text));
  return lines.length ? el("ul", { class: "group-trouble" }, ...lines) : null;
}

function prefillCard({ group, rate: jobs }) {
  const ranks = group.ranks.map((rank) => {
    const level = rank.num_jobs === null || rank.trouble ? "bad" : rank.num_jobs ? "busy" : "idle";
    const jobs = rank.num_jobs === null ? "silent" : plural(rank.num_jobs, "job");
    return el("li", { class: "rank", dataset: { level }, title: group.endpoints[rank.rank] }, el("strong", {}, `rank ${rank.rank}`), jobs);
  });
  const done = jobsDone(group);
  return el(
    "li",
    { class: "group" },
    head(group),
    el("ol", { class: "chain", "aria-label": "Ranks of the chain" }, ...ranks),
    trouble(group),
    el("dl", { class: "facts" }, ...terms([
      ["requests", count(group.num_requests)],
      ["jobs/s", rate(jobs)],
      ["jobs done", done === null ? "-" : count(done)],
      ["epoch", count(group.epoch)],
    ])),
  );
}

function generationCard({ group, rate: steps }) {
  const held = group.generation;
  if (held === null) return el("li", { class: "group" }, head(group), trouble(group));
  const step = held.step;
  const facts = [
    ["requests", count(group.num_requests)],
    ["steps/s", rate(steps)],
    ["last step", step ? duration(step.took_ms) : "-", step ? stepNote(step) : ""],
    ["KV", bytes(held.kv.num_bytes - held.kv.num_bytes_free), `of ${bytes(held.kv.num_bytes)}`],
    ["residency", held.residency, held.is_approximate ? "approximate" : ""],
    ["device", held.device || "-"],
  ];
  if (held.speculation) {
    const { num_accepted, num_drafted } = held.speculation;
    facts.push(["drafts accepted", share(num_accepted, num_drafted), sources(held.speculation)]);
  }
  if (held.num_preemptions) facts.push(["preemptions", count(held.num_preemptions)]);
  return el("li", { class: "group" }, head(group), slots(held.slots), trouble(group), el("dl", { class: "facts" }, ...terms(facts)));
}

function stepNote(step) {
  const parts = [plural(step.num_rows, "row")];
  if (step.num_prefill_tokens) parts.push(`${count(step.num_prefill_tokens)} prompt tokens`);
  if (step.num_drafts) parts.push(plural(step.num_drafts, "draft"));
  if (step.predicted_ms) parts.push(`predicted ${duration(step.predicted_ms)}`);
  return parts.join(", ");
}

function sources(speculation) {
  const used = speculation.sources.filter((each) => each.num_drafted);
  return used.map((each) => `${each.source} ${share(each.num_accepted, each.num_drafted)}`).join(", ");
}

/** A square for each slot, or a bar where there are very many. */
function slots({ num_slots, num_free, num_leased, num_active, num_quarantined }) {
  const states = [["kv-active", num_active], ["kv-leased", num_leased], ["kv-quarantined", num_quarantined]];
  const said = [`${num_active} active`, `${num_leased} leased`, `${num_free} free`];
  const label = `${num_slots} slots: ${said.join(", ")}`;
  const text = el("p", { class: "muted" }, label);
  if (num_slots > MOST_SQUARES) {
    return el("div", {}, stackedBar(states.map(([name, num]) => [name, num / num_slots]), label), text);
  }
  const squares = el("div", { class: "squares", role: "img", "aria-label": label });
  for (const [name, num] of [...states, ["kv-free", num_free]]) {
    for (let each = 0; each < num; each += 1) squares.append(el("span", { class: name }));
  }
  return el("div", {}, squares, text);
}
