// Rates over the last seconds, from counts in successive states. Holds the states of the last WINDOW_MS.

const WINDOW_MS = 10000;

export class Rates {
  #states = [];

  /** Take the latest state. Counts that went back mean a restart of the orchestrator: its past is forgotten. */
  add(state) {
    const last = this.#states.at(-1);
    if (last && (state.now_ms < last.now_ms || newest(state) < newest(last))) this.#states = [];
    if (last && state.now_ms === last.now_ms) this.#states.pop();
    this.#states.push(state);
    while (state.now_ms - this.#states[0].now_ms > WINDOW_MS && this.#states.length > 2) this.#states.shift();
  }

  /** Steps a second of a generation group; null while that is not known. */
  steps(name) {
    return this.#grown((state) => group(state, name)?.generation?.num_steps);
  }

  /** Jobs a second of a prefill group. */
  jobs(name) {
    return this.#grown((state) => jobsDone(group(state, name)));
  }

  /** Output tokens a second, of all requests. */
  tokens() {
    return this.#ofRequests((request) => request.num_output_tokens);
  }

  /** Requests a second that have ended. */
  ended() {
    return this.#ofRequests((request) => (request.state === "finished" ? 1 : 0));
  }

  #grown(countOf) {
    const [first, last] = [this.#states[0], this.#states.at(-1)];
    const [before, after] = [first && countOf(first), last && countOf(last)];
    const seconds = this.#seconds();
    if (!seconds || typeof before !== "number" || typeof after !== "number" || after < before) return null;
    return (after - before) / seconds;
  }

  #ofRequests(countOf) {
    const seconds = this.#seconds();
    if (!seconds) return null;
    const [first, last] = [this.#states[0], this.#states.at(-1)];
    const before = new Map(first.requests.map((request) => [request.number, countOf(request)]));
    const top = newest(first);
    let grown = 0;
    for (const request of last.requests) {
      const had = before.get(request.number) ?? (request.number > top ? 0 : null);
      if (had !== null) grown += Math.max(countOf(request) - had, 0);
    }
    return grown / seconds;
  }

  #seconds() {
    return this.#states.length < 2 ? 0 : (this.#states.at(-1).now_ms - this.#states[0].now_ms) / 1000;
  }
}

/** Jobs that a prefill group has done: those of its busiest rank, as a job may need some ranks only. */
export function jobsDone(group) {
  const done = group?.ranks.map((rank) => rank.num_jobs_done).filter((num) => num !== null) ?? [];
  return done.length ? Math.max(...done) : null;
}

/** The median of some numbers; null without any. */
export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function newest(state) {
  return Math.max(0, ...state.requests.map((request) => request.number));
}

function group(state, name) {
  return state.groups.find((each) => each.name === name);
}
