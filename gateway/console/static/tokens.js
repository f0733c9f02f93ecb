// Where each token of an answer comes from, put together from the events of its stream. Pure.

/**
 * The tokens of one answer. An event names an origin where it changes, and the drafts of a step with the step's last
 * token: so tokens of a step are taken for sampled ones until then.
 */
export class Tokens {
  list = [];
  #origin = null;
  #numSteps = 0;

  /** Take an event; return the tokens that are new or known better by it. */
  take(event) {
    if (event.origin) this.#origin = event.origin;
    if (event.id === null) return [];
    this.list.push(this.#made(event));
    return event.drafts ? this.#verified(event.drafts) : [this.list.at(-1)];
  }

  #made(event) {
    const origin = this.#origin;
    const isPrefill = Boolean(origin?.prefill);
    const before = this.list.at(-1);
    this.#numSteps += isPrefill ? 0 : 1;
    return {
      index: event.index,
      id: event.id,
      text: event.text || event.own_text,
      kind: isPrefill ? "prefill" : "step",
      group: isPrefill ? origin.prefill : (origin?.generation ?? ""),
      step: isPrefill ? 0 : this.#numSteps,
      how: isPrefill ? "last rank of the chain" : "sampled",
      predicted_ms: !isPrefill && origin?.predicted_step_s ? origin.predicted_step_s * 1000 : null,
      taken_ms: before ? Math.max(event.at_ms - before.at_ms, 0) : null,
      at_ms: event.at_ms,
    };
  }

  /** Mark the tokens of the step that has ended: first its accepted drafts, then the token sampled after them. */
  #verified({ source, num_drafts, num_accepted, num_tokens }) {
    const tokens = this.list.slice(-num_tokens);
    this.#numSteps -= tokens.length - 1;
    tokens.forEach((token, place) => {
      token.step = this.#numSteps;
      token.kind = place < num_accepted ? "draft" : "step";
      token.predicted_ms = null; // predicted for steps without drafts
      token.how = place < num_accepted ? `draft ${place + 1} of ${num_drafts}, ${source}` : `sampled after ${num_accepted} of ${num_drafts} drafts`;
    });
    return tokens;
  }

  /** The request's own prediction of its first token, which only its end tells. */
  first(predicted_ms, taken_ms) {
    if (this.list.length) Object.assign(this.list[0], { predicted_ms, taken_ms });
  }

  /** How many tokens came from where. */
  counts() {
    const found = { prefill: 0, step: 0, draft: 0 };
    for (const token of this.list) found[token.kind] += 1;
    return found;
  }
}

/** A token's text with what cannot be seen made visible; its id where it has no text, like a token that ends. */
export function visible({ text, id }) {
  return text === "" ? `(id ${id})` : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣");
}
