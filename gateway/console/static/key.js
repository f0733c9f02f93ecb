// The dialog that asks for the API key, once for each time that the server misses one or refuses it.

import { givenKey, useKey } from "./api.js";
import { byId, setText } from "./dom.js";

const dialog = byId("key-dialog");
const field = byId("key-value");
const WHY = byId("key-reason").textContent;

let tell = () => {};
let refused = null;

/** Call `then` whenever another key is to be used. */
export function onKeyChange(then) {
  tell = then;
}

/** Ask for a key. `why` is what the server said; empty when the user wants to change it. */
export function askForKey(why) {
  const isKnown = why && refused === givenKey();
  if (dialog.open || isKnown) return; // the user has declined to give another
  refused = why ? givenKey() : refused;
  setText(byId("key-reason"), why ? `${why}. ${WHY}` : WHY);
  field.value = "";
  dialog.showModal();
  field.focus();
}

dialog.addEventListener("close", () => {
  const choice = dialog.returnValue;
  dialog.returnValue = "";
  if (choice === "use" && field.value) useKey(field.value.trim());
  else if (choice === "forget") useKey("");
  else return;
  field.value = "";
  refused = null;
  tell();
});
