// The screen of KV by tier: slots' memory at home and on the device, and nodes' prefix stores in memory and on disk.

import { byId, el, reconcile, stackedBar } from "./dom.js";
import { bytes, plural, share } from "./format.js";

const STATES = [
  ["kv-active", "num_bytes_active", "active"],
  ["kv-leased", "num_bytes_leased", "leased"],
  ["kv-quarantined", "num_bytes_quarantined", "quarantined"],
];

export function showMemory(state) {
  const groups = state.groups.filter((group) => group.generation);
  reconcile(byId("slot-tiers"), groups.map(slotView), (view) => view.name, slotTier);
  const stores = storesOf(state.groups);
  byId("no-stores").hidden = stores.length > 0;
  reconcile(byId("store-tiers"), stores, (store) => store.identity, storeTier);
}

function slotView(group) {
  const { kv, num_bytes_held, num_device_bytes, device } = group.generation;
  return { name: group.name, kv, num_bytes_held, num_device_bytes, device };
}

/** The stores that groups name, each once, with the groups that share it: those of one node do. */
function storesOf(groups) {
  const found = new Map();
  for (const group of groups.filter((each) => each.store)) {
    const known = found.get(group.store.identity) ?? { ...group.store, groups: [], num_bytes_read: 0, num_disk_bytes_read: 0, num_bytes_stored: 0 };
    known.groups.push(group.name);
    for (const name of ["num_bytes_read", "num_disk_bytes_read", "num_bytes_stored"]) known[name] += group.store[name];
    found.set(known.identity, known);
  }
  return [...found.values()];
}

function slotTier({ name, kv, num_bytes_held, num_device_bytes, device }) {
  const parts = STATES.map(([style, field]) => [style, kv.num_bytes ? kv[field] / kv.num_bytes : 0]);
  const used = kv.num_bytes - kv.num_bytes_free;
  const states = STATES.filter(([, field]) => kv[field]).map(([, field, word]) => `${bytes(kv[field])} ${word}`);
  const said = `${states.length ? `${states.join(", ")}, ` : ""}${bytes(kv.num_bytes_free)} free of ${bytes(kv.num_bytes)}`;
  const isHost = device === "cpu";
  const tiers = [
    tier(isHost ? "host" : "home", parts, said, share(used, kv.num_bytes)),
    fact("touched", `${bytes(num_bytes_held)} in pages that were written`),
    fact("device", isHost ? "the CPU computes in host memory" : `${bytes(num_device_bytes)} of KV (${device || "unknown"})`),
  ];
  return el("li", { class: "tier-group" }, el("h4", {}, name), el("dl", { class: "tier-rows" }, ...tiers));
}

function storeTier(store) {
  const inMemory = store.limit_bytes ? store.num_bytes / store.limit_bytes : 0;
  const tiers = [
    tier("memory", [["kv-stored", inMemory]], `${bytes(store.num_bytes)} of ${bytes(store.limit_bytes)} in ${plural(store.num_blocks, "block")}`, share(store.num_bytes, store.limit_bytes)),
  ];
  if (store.limit_disk_bytes) {
    const onDisk = store.num_disk_bytes / store.limit_disk_bytes;
    tiers.push(tier("disk", [["kv-stored", onDisk]], `${bytes(store.num_disk_bytes)} of ${bytes(store.limit_disk_bytes)}`, share(store.num_disk_bytes, store.limit_disk_bytes)));
  } else {
    tiers.push(fact("disk", "none"));
  }
  tiers.push(
    fact("read", `${bytes(store.num_bytes_read)} into slots, ${bytes(store.num_disk_bytes_read)} of them from disk`),
    fact("stored", `${bytes(store.num_bytes_stored)} of answers`),
    fact("moved", `${bytes(store.num_bytes_fetched)} fetched from other nodes, ${bytes(store.num_bytes_sent)} sent`),
  );
  return el("li", { class: "tier-group" }, el("h4", {}, store.groups.join(", ")), el("dl", { class: "tier-rows" }, ...tiers));
}

function tier(name, parts, said, used) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, stackedBar(parts, `${name}: ${said}`), el("span", {}, said), el("span", { class: "muted" }, ` ${used} used`)));
}

function fact(name, said) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, said));
}
