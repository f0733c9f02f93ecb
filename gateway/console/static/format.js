// Numbers as people read them. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A number of bytes, in powers of 1024. */
export function bytes(value) {
  let unit = 0;
  let left = Math.abs(value);
  while (left >= 1000 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || left >= 99.95 ? 0 : 1;
  return `${value < 0 ? "-" : ""}${left.toFixed(digits)} ${UNITS[unit]}`;
}

/** Milliseconds as ms or s, in about three digits. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "-";
  if (ms >= 99950) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 999.5) return `${(ms / 1000).toFixed(ms >= 9995 ? 1 : 2)} s`;
  return `${ms.toFixed(ms >= 99.95 ? 0 : 1)} ms`;
}

/** A rate a second, in about three digits; "-" where it is not known yet. */
export function rate(value) {
  if (value === null || value === undefined) return "-";
  return value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
}

/** A count with thousands apart. */
export function count(value) {
  return value.toLocaleString("en-US");
}

/** A part of a whole in percent; "-" without a whole. */
export function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}%` : "-";
}

/** The noun in the number that the count asks for. */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
