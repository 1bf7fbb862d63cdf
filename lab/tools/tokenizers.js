// The tokenizers of lab/data/tokenizers.py in JavaScript. The bytes of an id are represented by a string with one
// character (code 0 to 255) per byte.
"use strict";

const to_bytes = text => Array.from(new TextEncoder().encode(text), byte => String.fromCharCode(byte));
const from_bytes = string => Uint8Array.from(string, c => c.charCodeAt(0));

// One token per byte of UTF-8, and end-of-text.
class ByteTokenizer {
  constructor() {
    this.eot = 256;
  }

  encode(text) {
    return to_bytes(text).map(byte => byte.charCodeAt(0));
  }

  bytes_of(id) {
    return id == this.eot ? "" : String.fromCharCode(id);
  }
}

// GPT-2's byte pair encoding. Repeatedly merges two adjacent tokens into one: the pair whose merged token has the lowest id
// (Sennrich et al. 2016).
class GPT2Tokenizer {
  constructor(tokens) {
    this.tokens = tokens;
    this.eot = tokens.length;
    this.ids = new Map(tokens.map((token, id) => [token, id]));
    // words are encoded one by one; a word includes the space before it. JavaScript's \s is not Unicode's White_Space.
    const blank = String.raw`\p{White_Space}`;
    this.pattern = new RegExp(`'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^${blank}\\p{L}\\p{N}]+|${blank}+(?!\\P{White_Space})|${blank}+`, "gu");
  }

  encode(text) {
    return (text.match(this.pattern) ?? []).flatMap(word => this.encode_word(word));
  }

  encode_word(word) {
    let parts = to_bytes(word);
    while (parts.length > 1) {
      const ranks = parts.slice(1).map((part, i) => this.ids.get(parts[i] + part) ?? Infinity);
      const lowest = ranks.reduce((best, rank, i) => (rank < ranks[best] ? i : best), 0);
      if (ranks[lowest] == Infinity) break;
      parts.splice(lowest, 2, parts[lowest] + parts[lowest + 1]);
    }
    return parts.map(part => this.ids.get(part));
  }

  bytes_of(id) {
    return id == this.eot ? "" : this.tokens[id];
  }
}
