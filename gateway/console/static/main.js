// The page: which screen is shown, the question that repeats while it is looked at, and how the cluster is.

import { fetchState } from "./api.js";
import { showCluster } from "./cluster.js";
import { byId, setText } from "./dom.js";
import { askForKey, onKeyChange } from "./key.js";
import { showMemory } from "./memory.js";
import { showModel, stopAnswer } from "./playground.js";
import { Rates } from "./rates.js";
import { onRequestOptions, showRequests } from "./requests.js";

const PERIOD_MS = 1000;
const SCREENS = ["cluster", "requests", "memory", "playground"];
const SHOWN = { cluster: showCluster, requests: showRequests, memory: showMemory, playground: showModel };

const rates = new Rates();
let latest = null;
let isPaused = false;
let timer = null;
let isAsking = false;

function screen() {
  return SCREENS.find((name) => !byId(`screen-${name}`).hidden);
}

function route() {
  const wanted = location.hash.slice(1);
  if (!SCREENS.includes(wanted) && screen()) return; // the link that skips to the content
  const name = SCREENS.includes(wanted) ? wanted : SCREENS[0];
  for (const each of SCREENS) byId(`screen-${each}`).hidden = each !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${byId(`title-${name}`).textContent} - Baton console`;
  draw();
}

function draw() {
  if (latest) SHOWN[screen()](latest, rates);
}

/** Ask once, then again after the rest of the period; not at all while the page is hidden or paused. */
async function tick() {
  clearTimeout(timer);
  if (isPaused || document.hidden || isAsking) return;
  const began = performance.now();
  isAsking = true;
  try {
    const state = await fetchState();
    if (!isPaused) show(state);
  } catch (error) {
    if (!isPaused) tell(error);
  }
  isAsking = false;
  timer = setTimeout(tick, Math.max(0, PERIOD_MS - (performance.now() - began)));
}

function show(state) {
  latest = state;
  rates.add(latest);
  tell(null);
  draw();
}

function tell(error) {
  const trouble = byId("trouble");
  const health = byId("health");
  document.body.classList.toggle("stale", error !== null);
  trouble.hidden = error === null || error.status === 401;
  if (error !== null) {
    const away = error.status ? error.message : "The gateway does not answer: it may be restarting.";
    setText(trouble, latest ? `${away} What is shown is older.` : away);
    setText(health, error.status === 401 ? "API key needed" : "no answer");
    health.dataset.level = "bad";
    if (error.status === 401) askForKey(error.message);
    return;
  }
  const isServing = !latest.why_not_serving.length;
  const isWhole = isServing && !latest.why_degraded.length;
  setText(health, isWhole ? "serving" : isServing ? "degraded" : "not serving");
  health.dataset.level = isWhole ? "good" : isServing ? "fair" : "bad";
  setText(byId("served"), `${latest.model.name} · version ${latest.version}`);
}

function pause(wanted) {
  isPaused = wanted;
  byId("pause").setAttribute("aria-pressed", String(wanted));
  setText(byId("pause"), wanted ? "Resume" : "Pause");
  if (wanted) setText(byId("health"), "paused");
  else tick();
}

byId("pause").addEventListener("click", () => pause(!isPaused));
byId("key").addEventListener("click", () => askForKey(""));
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", tick);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopAnswer();
});
onKeyChange(tick);
onRequestOptions(draw);
route();
tick();
