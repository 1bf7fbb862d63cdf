// GPT-2 in plain JavaScript: section 2 of train_gpt2.py (the model) and lab/inference/generate.py (the key-value
// cache, sampling), with the same names in the same order, so that both can be read side by side.
//
// python -m lab export log/RUN --html my-model.html copies this file into the page unchanged.
//
// Differences: there is no training, and a forward pass computes one token instead of (B, T) tokens. The keys and
// values of earlier tokens are in the cache, so x is the residual stream (C) of one token. An array is a flat
// Float32Array; a matrix (n_out, n_in) is stored row by row, as in PyTorch. Sums are computed in 64 bits and
// rounded to 32.
//
// Shape letters: C channels (n_embd), H heads, D head size (C = H * D), S keys that the token can attend to,
// V vocabulary.
"use strict";

// ------------------------------------------------------------------------------------------ layers

// A state dict is {name: Float32Array}. A layer looks up its own weights by the name that it has in train_gpt2.py.

class Linear {
  constructor(state_dict, name) {
    this.weight = state_dict[`${name}.weight`]; // (n_out, n_in)
    this.bias = state_dict[`${name}.bias`]; // (n_out); missing in lm_head
  }

  forward(x) {
    const n_in = x.length, n_out = this.weight.length / n_in, y = new Float32Array(n_out);
    for (let o = 0; o < n_out; o++) y[o] = dot(this.weight, o * n_in, x, 0, n_in) + (this.bias ? this.bias[o] : 0);
    return y;
  }
}

function dot(a, a_start, b, b_start, n) {
  let even = 0, odd = 0; // two sums, because the processor can add them at the same time
  for (let i = 0; i + 1 < n; i += 2) {
    even += a[a_start + i] * b[b_start + i];
    odd += a[a_start + i + 1] * b[b_start + i + 1];
  }
  return n % 2 ? even + odd + a[a_start + n - 1] * b[b_start + n - 1] : even + odd;
}

class LayerNorm {
  constructor(state_dict, name) {
    this.weight = state_dict[`${name}.weight`]; // (C)
    this.bias = state_dict[`${name}.bias`]; // (C)
  }

  forward(x) {
    const mean = sum(x) / x.length;
    const variance = sum(x.map(v => (v - mean) ** 2)) / x.length;
    const scale = 1 / Math.sqrt(variance + 1e-5);
    return x.map((v, i) => (v - mean) * scale * this.weight[i] + this.bias[i]);
  }
}

const sum = x => x.reduce((total, v) => total + v, 0);
const add = (x, y) => x.map((v, i) => v + y[i]);
const gelu = v => 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3)));

function softmax(x) {
  let max = -Infinity;
  for (const v of x) max = Math.max(max, v); // subtracting it avoids an overflow of exp
  const exp = x.map(v => Math.exp(v - max)), total = sum(exp);
  return exp.map(v => v / total);
}

// ------------------------------------------------------------------------------------------- model

class CausalSelfAttention {
  constructor(config, layer, state_dict, name) {
    this.n_head = config.n_head;
    this.layer = layer;
    this.c_attn = new Linear(state_dict, `${name}.c_attn`); // q, k, v of all heads at once
    this.c_proj = new Linear(state_dict, `${name}.c_proj`);
  }

  // first: the first token that this one may attend to; it is above 0 only with document_mask.
  forward(x, position, first, cache, trace) {
    const C = x.length, D = C / this.n_head;
    const qkv = this.c_attn.forward(x), q = qkv.subarray(0, C);
    const { k, v } = cache.update(this.layer, position, qkv.subarray(C, 2 * C), qkv.subarray(2 * C)); // (S, C)
    const y = new Float32Array(C), heads = [];
    for (let h = 0; h < this.n_head; h++) {
      const scores = new Float32Array(position + 1).fill(-Infinity); // (S); exp(-Infinity) = 0: no weight
      for (let s = first; s <= position; s++) scores[s] = dot(q, h * D, k, s * C + h * D, D) * D ** -0.5;
      const weights = softmax(scores);
      for (let s = first; s <= position; s++)
        for (let d = h * D; d < (h + 1) * D; d++) y[d] += weights[s] * v[s * C + d];
      heads.push(weights);
    }
    trace?.attention.push(heads);
    return this.c_proj.forward(y);
  }
}

class MLP {
  constructor(state_dict, name) {
    this.c_fc = new Linear(state_dict, `${name}.c_fc`);
    this.c_proj = new Linear(state_dict, `${name}.c_proj`);
  }

  forward(x) {
    return this.c_proj.forward(this.c_fc.forward(x).map(gelu));
  }
}

class Block {
  constructor(config, layer, state_dict, name) {
    this.ln_1 = new LayerNorm(state_dict, `${name}.ln_1`);
    this.attn = new CausalSelfAttention(config, layer, state_dict, `${name}.attn`);
    this.ln_2 = new LayerNorm(state_dict, `${name}.ln_2`);
    this.mlp = new MLP(state_dict, `${name}.mlp`);
  }

  forward(x, position, first, cache, trace) {
    x = add(x, this.attn.forward(this.ln_1.forward(x), position, first, cache, trace));
    return add(x, this.mlp.forward(this.ln_2.forward(x)));
  }
}

class GPT {
  constructor(config, state_dict) {
    this.config = config;
    this.transformer = {
      wte: state_dict["transformer.wte.weight"], // token embedding (V, C)
      wpe: state_dict["transformer.wpe.weight"], // position embedding (block_size, C)
      h: Array.from({ length: config.n_layer }, (_, i) => new Block(config, i, state_dict, `transformer.h.${i}`)),
      ln_f: new LayerNorm(state_dict, "transformer.ln_f"),
    };
    this.lm_head = new Linear({ "lm_head.weight": this.transformer.wte }, "lm_head"); // tied
  }

  // The residual stream (C) of one token after the last block.
  hidden(token, position, first, cache, trace) {
    const C = this.config.n_embd, { wte, wpe, h } = this.transformer;
    let x = add(wte.subarray(token * C, (token + 1) * C), wpe.subarray(position * C, (position + 1) * C));
    trace?.residual.push(x);
    for (const block of h) {
      x = block.forward(x, position, first, cache, trace);
      trace?.residual.push(x);
    }
    return x;
  }

  // Logits (V) read from the residual stream x (C).
  head(x) {
    return this.lm_head.forward(this.transformer.ln_f.forward(x));
  }

  // Token ids idx, at most block_size -> logits (V) of the last one. Only tokens that are not in the cache yet, and
  // the last one, are computed. trace: {attention: [], residual: []}, which receives the last token's attention
  // weights, attention[layer][head] (S), and its residual stream, residual[0] before the first block and
  // residual[i] after block i (C).
  forward(idx, cache = new KVCache(this.config), trace = null) {
    let x;
    for (let position = cache.reuse(idx); position < idx.length; position++) {
      const end_of_text = idx.lastIndexOf(this.config.end_of_text, position);
      const first = this.config.document_mask ? Math.max(0, end_of_text) : 0;
      x = this.hidden(idx[position], position, first, cache, position == idx.length - 1 ? trace : null);
    }
    return this.head(x);
  }
}

// --------------------------------------------------------------------------------------- generation

// Keys and values of the tokens so far, so that a new token needs a forward pass of one position.
class KVCache {
  constructor(config) {
    const buffers = () => Array.from({ length: config.n_layer }, () => new Float32Array(config.block_size * config.n_embd));
    this.keys = buffers(); // of each layer (block_size, C)
    this.values = buffers();
    this.idx = []; // the tokens that keys and values belong to
  }

  // The position of the first token of idx that must be computed. The last one always is, to get its logits.
  reuse(idx) {
    let same = 0;
    while (same < idx.length && idx[same] === this.idx[same]) same++;
    if (same < idx.length) this.idx = Array.from(idx);
    return Math.min(same, idx.length - 1);
  }

  // Store k and v (C) of the token at this position; return those of all positions.
  update(layer, position, k, v) {
    this.keys[layer].set(k, position * k.length);
    this.values[layer].set(v, position * v.length);
    return { k: this.keys[layer], v: this.values[layer] };
  }
}

// The end of idx that fits into the model's context of block_size tokens. Each time the window is full, its older
// half is dropped. Positions are absolute, so the other tokens get new positions and are computed again.
function context(idx, block_size) {
  const dropped = block_size + 1 - Math.max(1, Math.floor(block_size / 2));
  return idx.slice(dropped * Math.max(0, Math.ceil((idx.length - block_size) / dropped)));
}

// Yield the next token of idx, and the logits (V) it was sampled from, max_new_tokens times. random: a function that
// returns a number in [0, 1).
function* generate(model, idx, max_new_tokens, sampling = {}, random = Math.random, cache = new KVCache(model.config)) {
  for (let i = 0; i < max_new_tokens; i++) {
    const logits = model.forward(context(idx, model.config.block_size), cache);
    const token = sample_token(logits, sampling, random);
    yield [token, logits];
    idx = [...idx, token];
  }
}

// Sample a token. temperature 0 is greedy. top_k keeps the k most probable tokens (0: all) and those tied with the
// last of them. top_p keeps the fewest tokens whose probabilities add up to it.
function sample_token(logits, sampling, random) {
  const probs = sampling_probs(logits, sampling);
  let rest = random();
  for (let token = 0; token < probs.length; token++) if ((rest -= probs[token]) < 0) return token;
  return argmax(probs); // the rounded probabilities add up to a little less than 1
}

function sampling_probs(logits, { temperature = 1, top_k = 0, top_p = 1 }) {
  const best = argmax(logits);
  if (temperature < 1e-30) return logits.map((_, token) => (token == best ? 1 : 0));
  logits = Float64Array.from(logits, v => v / temperature);
  if (0 < top_k && top_k < logits.length) {
    const kth = logits.slice().sort()[logits.length - top_k];
    logits = logits.map(v => (v < kth ? -Infinity : v));
  }
  if (top_p < 1) {
    const probs = softmax(logits), order = Array.from(probs.keys()).sort((a, b) => probs[b] - probs[a]);
    let total = 0;
    for (const token of order) {
      if (total >= top_p && token != best) logits[token] = -Infinity; // more probable tokens already add up to top_p
      total += probs[token];
    }
  }
  return softmax(logits);
}

function argmax(x) {
  let best = 0;
  for (let i = 1; i < x.length; i++) if (x[i] > x[best]) best = i;
  return best;
}

// A function that returns random numbers in [0, 1): mulberry32 (Tommy Ettinger 2017), which scrambles the bits of a
// 32-bit counter.
function seeded_random(seed) {
  let counter = seed;
  return () => {
    counter = (counter + 0x6d2b79f5) | 0;
    let mixed = Math.imul(counter ^ (counter >>> 15), counter | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// ----------------------------------------------------------------------------------------- weights

// base64 of float16 numbers -> {name: Float32Array}. shapes: [[name, length], ...] in the order of the numbers.
function read_state_dict(base64, shapes) {
  const string = atob(base64), bytes = new Uint8Array(string.length), state_dict = {};
  for (let i = 0; i < bytes.length; i++) bytes[i] = string.charCodeAt(i);
  const halves = new Uint16Array(bytes.buffer);
  let start = 0;
  for (const [name, length] of shapes) {
    state_dict[name] = new Float32Array(length);
    for (let i = 0; i < length; i++) state_dict[name][i] = half_to_float(halves[start + i]);
    start += length;
  }
  return state_dict;
}

// float16 has 1 bit for the sign, 5 for the exponent and 10 for the fraction.
function half_to_float(half) {
  const sign = half >> 15 ? -1 : 1, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 0) return sign * fraction * 2 ** -24; // no leading 1
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}
