"""GPT-2 in plain Python, with gradients and training: `python tiny_gpt.py` learns to make up names.

The model is train_gpt2.py's: equal weights give equal logits and gradients. Each operation returns
its output y and a function `back`: given the gradient of the loss with respect to y, it adds to the
gradients of the weights and returns the gradient with respect to x. Matrices are lists of rows; x
has one row of C numbers for each of T tokens."""

import math
import random
from pathlib import Path


def dot(a, b):
    return sum([x * y for x, y in zip(a, b)])


def matmul(A, B):  # zip(*A) is A transposed
    columns = list(zip(*B))
    return [[dot(row, column) for column in columns] for row in A]


def add(A, B):
    return [[x + y for x, y in zip(a, b)] for a, b in zip(A, B)]


def softmax(row):
    total = sum(exps := [math.exp(v) for v in row])
    return [e / total for e in exps]


class TinyGPT:
    def __init__(self, vocab_size, block_size=16, n_layer=1, n_head=4, C=16):
        self.w, self.n_layer, self.n_head = {}, n_layer, n_head
        shapes = {"wte": (vocab_size, C, 0.02), "wpe": (block_size, C, 0.02)}  # token, position
        for h in (f"h.{n}." for n in range(n_layer)):
            std = 0.02 / math.sqrt(2 * n_layer)  # smaller where the output is added to x
            shapes |= {h + "attn.c_attn": (3 * C, C, 0.02), h + "attn.c_proj": (C, C, std)}
            shapes |= {h + "mlp.c_fc": (4 * C, C, 0.02), h + "mlp.c_proj": (C, 4 * C, std)}
        for name, (rows, columns, std) in shapes.items():
            w = [[random.gauss(0, std) for _ in range(columns)] for _ in range(rows)]
            self.w[name] = [row + [0.0] for row in w] if "." in name else w  # last column: bias
        for name in ("ln_f", *(f"h.{n}.ln_{i}" for n in range(n_layer) for i in (1, 2))):
            self.w[name] = [[1.0] * C, [0.0] * C]  # gain and bias
        zeros = [{k: [[0.0] * len(r) for r in w] for k, w in self.w.items()} for _ in range(3)]
        self.g, self.m, self.v = zeros  # gradients, and Adam's means of them and of their squares

    def linear(self, x, name):
        x = [row + [1.0] for row in x]  # the bias is the weight of a constant 1

        def back(d):
            self.g[name] = add(self.g[name], matmul(zip(*d), x))
            return [row[:-1] for row in matmul(d, self.w[name])]

        return matmul(x, zip(*self.w[name])), back

    def layer_norm(self, x, name):  # each row to mean 0 and variance 1, times gain, plus bias
        C, (gain, bias) = len(x[0]), self.w[name]
        x = [[v - mean for v in row] for row, mean in zip(x, [sum(row) / C for row in x])]
        scales = [(dot(row, row) / C + 1e-5) ** -0.5 for row in x]
        x = [[v * scale for v in row] for row, scale in zip(x, scales)]

        def back(d):  # no gradient along a row's mean and scale
            self.g[name] = add(self.g[name], [map(dot, zip(*d), zip(*x)), map(sum, zip(*d))])
            d = [[v * g * s for v, g in zip(row, gain)] for row, s in zip(d, scales)]
            return [[u - (sum(a) + v * dot(a, b)) / C for u, v in zip(a, b)] for a, b in zip(d, x)]

        return [[v * g + b for v, g, b in zip(row, gain, bias)] for row in x], back

    def gelu(self, x):  # GPT-2's approximation: v (1 + tanh(c v + b v^3)) / 2
        c, b = math.sqrt(2 / math.pi), math.sqrt(2 / math.pi) * 0.044715
        t = [[math.tanh(c * v + b * v**3) for v in row] for row in x]
        y = [[v * (1 + u) / 2 for v, u in zip(*r)] for r in zip(x, t)]
        dy = [[1 + u + (1 - u * u) * (c * v + 3 * b * v**3) for v, u in zip(*r)] for r in zip(x, t)]
        return y, lambda d: [[g * slope / 2 for g, slope in zip(*r)] for r in zip(d, dy)]

    def attention(self, x):  # (T, 3 C) -> (T, C): each token averages over itself and earlier ones
        H, D, heads = self.n_head, len(x[0]) // 3 // self.n_head, []
        parts = [[row[i : i + D] for row in x] for i in range(0, len(x[0]), D)]
        for q, k, v in zip(parts[:H], parts[H : 2 * H], parts[2 * H :]):
            scores = enumerate(matmul(q, zip(*k)))
            p = [softmax([s / D**0.5 for s in row[: t + 1]]) for t, row in scores]
            heads.append((q, k, v, [row + [0.0] * (len(x) - len(row)) for row in p]))

        def back(d):
            grads = []  # of q, k and v, for each head
            for h, (q, k, v, p) in enumerate(heads):
                dy = [row[h * D : h * D + D] for row in d]
                rows = [(a, b, dot(a, b)) for a, b in zip(p, matmul(dy, zip(*v)))]
                ds = [[w * (u - m) / D**0.5 for w, u in zip(a, b)] for a, b, m in rows]  # softmax
                grads.append((matmul(ds, k), matmul(zip(*ds), q), matmul(zip(*p), dy)))
            return [sum(rows, []) for rows in zip(*(g for kind in zip(*grads) for g in kind))]

        return [sum(rows, []) for rows in zip(*(matmul(p, v) for _, _, v, p in heads))], back

    def forward(self, tokens):  # -> probabilities of the next token at each position, and back
        x, backs = add([self.w["wte"][i] for i in tokens], self.w["wpe"]), []
        attn = "ln_1", "attn.c_attn", self.attention, "attn.c_proj"
        mlp = "ln_2", "mlp.c_fc", self.gelu, "mlp.c_proj"
        for n in range(self.n_layer):
            for norm, first, mix, last in (attn, mlp):
                y, back_1 = self.layer_norm(x, f"h.{n}.{norm}")
                y, back_2 = self.linear(y, f"h.{n}.{first}")
                y, back_3 = mix(y)
                y, back_4 = self.linear(y, f"h.{n}.{last}")
                x = add(x, y)  # the residual stream
                backs.append((back_1, back_2, back_3, back_4))
        x, back_f = self.layer_norm(x, "ln_f")
        p = [softmax(row) for row in matmul(x, zip(*self.w["wte"]))]  # the embedding again

        def back(targets):  # loss: mean of -ln p(target)
            d = [[(v - (i == y)) / len(p) for i, v in enumerate(row)] for row, y in zip(p, targets)]
            self.g["wte"] = add(self.g["wte"], matmul(zip(*d), x))
            d = back_f(matmul(d, self.w["wte"]))
            for back_1, back_2, back_3, back_4 in reversed(backs):
                d = add(d, back_1(back_2(back_3(back_4(d)))))
            self.g["wpe"] = add(self.g["wpe"], d) + self.g["wpe"][len(d) :]
            for i, row in zip(tokens, d):
                self.g["wte"][i] = [a + b for a, b in zip(self.g["wte"][i], row)]

        return p, back

    def update(self, step, lr, beta1=0.9, beta2=0.99):  # Adam
        for w, g, m, v in zip(*(sum(x.values(), []) for x in (self.w, self.g, self.m, self.v))):
            for i in range(len(w)):
                m[i] += (1 - beta1) * (g[i] - m[i])
                v[i] += (1 - beta2) * (g[i] ** 2 - v[i])
                root = math.sqrt(v[i] / (1 - beta2**step)) + 1e-8
                w[i], g[i] = w[i] - lr * m[i] / (1 - beta1**step) / root, 0.0


if __name__ == "__main__":
    random.seed(1)
    names = Path(__file__).with_name("examples").joinpath("names.txt").read_text().lower().split()
    chars = ["", *sorted(set("".join(names)))]  # token 0 starts and ends a name
    model, losses, steps = TinyGPT(len(chars)), [], 500
    for step in range(1, steps + 1):
        for name in random.sample(names, 16):
            tokens = [0, *map(chars.index, name), 0]
            p, back = model.forward(tokens[:-1])
            back(tokens[1:])  # the gradients of 16 names add up
            losses.append(-sum(math.log(row[y]) for row, y in zip(p, tokens[1:])) / len(p))
        model.update(step, lr=0.01 * (1 - step / steps))
        if step % 50 == 0:
            print(f"step {step:3}: loss {sum(losses[-800:]) / 800:.3f}")
    for _ in range(10):
        tokens = [0]
        while len(tokens) == 1 or (tokens[-1] and len(tokens) < 16):
            tokens += random.choices(range(len(chars)), model.forward(tokens)[0][-1])
        name = "".join(chars[i] for i in tokens)
        print(name.title(), "(in the list)" if name in names else "")
