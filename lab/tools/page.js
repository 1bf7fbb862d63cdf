"use strict"; // page.js: shared by the pages' scripts
const $ = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); // a color of page.html.j2
const percent = p => p >= 0.9995 ? "100 %" : p >= 0.0005 ? (100 * p).toFixed(1) + " %" : p > 0 ? "< 0.1 %" : "0 %";
const plural = (n, word) => `${n} ${word}${n == 1 ? "" : "s"}`;
// show control characters as symbols, and characters that would reorder the text as U+FFFD
const shown = text => text.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, c => c == "\x7f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0)))
  .replace(/[\x80-\x9f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
// a token's text, with its spaces and line ends as symbols
const visible = text => shown(text).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");

// the tokens that the last of them attends to most: "␣ (itself) 41.8 %, e (1 back) 35.6 %"; name(i): of the token with weights[i]
function most_attended(weights, name) {
  const most = Array.from(weights.keys()).sort((a, b) => weights[b] - weights[a]).slice(0, 3).filter(i => weights[i] >= .005);
  const place = i => i == weights.length - 1 ? "itself" : weights.length - 1 - i + " back";
  return most.map(i => `${name(i)} ${`(${place(i)}) ${percent(weights[i])}`.replaceAll(" ", "\u00a0")}`).join(", ") || "no token with 0.5 % or more";
}

// where the browser would drop a typed decimal comma ("0,5" would become 05), write a point; a listener of "beforeinput"
function commaToPoint(event) {
  const { data, target } = event;
  if (target.type != "number" || !target.step.includes(".") || !data?.includes(",") || (1.5).toLocaleString().includes(",")) return;
  event.preventDefault();
  document.execCommand("insertText", false, data.replace(",", "."));
}

function make(tag, parent, text = "", more = {}) { // a new element with a text, which is never HTML
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(more))
    name == "role" || name.startsWith("aria-") ? one.setAttribute(name, value) : one[name] = value;
  one.textContent = text;
  parent.append(one);
  return one;
}
