"""Random changes to the bytes of a file, for bench/fuzz.py: one function for each format.

Each takes the bytes of a valid file and a random.Random, and returns the changed bytes.
"""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

ODD = [None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x",
       "x" * 100_000, "\ud800", "../../etc/passwd", [], {}, [[]], ["a", 1], {"a": {}}, "DEEP"]  # fmt: skip
DEEP = "[" * 100_000


def paths(tree, path=()):
    """Yield the path (keys and indices) of every value in nested dicts and lists."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*path, key)
        yield from paths(tree[key], (*path, key))


def mutate_tree(tree, rng, odd=ODD):
    """Replace, delete or add one value in nested dicts and lists, or replace the whole tree."""
    found = list(paths(tree))
    if not found or rng.random() < 0.05:
        return rng.choice(odd)
    *parents, key = rng.choice(found)
    at = tree
    for parent in parents:
        at = at[parent]
    if rng.random() < 0.2:
        del at[key]
    elif isinstance(at, dict) and rng.random() < 0.1:
        at[rng.choice(["x", "", "../x", "__class__"])] = rng.choice(odd)
    else:
        at[key] = rng.choice(odd)
    return tree


def mutate_json(data, rng):
    """Change a value of a JSON file, or of one line of a JSON Lines file."""
    try:
        json.loads(data)
        lines = [data]
    except ValueError:
        lines = data.strip().split(b"\n")
    i = rng.randrange(len(lines))
    tree = mutate_tree(json.loads(lines[i]), rng)
    lines[i] = json.dumps(tree).replace('"DEEP"', DEEP).encode()
    return b"\n".join(lines)


def mutate_safetensors(data, rng):
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def mutate_npy(data, rng):
    """Change the header of a .npy file, and sometimes its version."""
    size = int.from_bytes(data[8:10], "little")
    dtype = rng.choice(["<u2", ">u2", "<i2", "<u4", "|O", "<f8", "|V0", "<U9", "|S0", "x", ""])
    shape = rng.choice([(), (0,), (-1,), (2**40,), (2**70,), (10, 10), (1,) * 99, ("a",), 3, None])
    header = {"descr": "<u2", "fortran_order": False, "shape": (2000,)}
    header[rng.choice([*header, "x"])] = rng.choice([dtype, shape, True, None, 0.5, b"x"])
    text = rng.choice([repr(header), repr(header), "(" * 50_000, "__import__('os').system('id')"])
    version = bytes(rng.choice([(1, 0), (2, 0), (3, 0), (9, 9)]))
    length = len(text).to_bytes(2 if version == b"\1\0" else 4, "little")[-4:]
    return data[:6] + version + length + text.encode() + data[10 + size :]


def mutate_bin(data, rng):
    """Change a number in the header of one of llm.c's .bin files."""
    header = np.frombuffer(data[:1024], "<i4").copy()
    header[rng.choice([0, 1, 2, 3, 255])] = rng.choice(
        [0, 1, -1, 2, 1999, 2001, 2**31 - 1, -(2**31)]
    )
    return header.tobytes() + data[1024:]


def mutate_parquet(data, rng):
    """Change one value or a whole column, perhaps also the column's type, and write a valid file."""
    rows = pq.read_table(io.BytesIO(data)).to_pylist()
    if rng.random() < 0.5:  # in all rows, because a column has one type
        name, value = rng.choice([*rows[0]]), rng.choice(ODD)
        for row in rows:
            row[name] = value
    else:
        rows = mutate_tree(rows, rng)
    try:
        table = pa.Table.from_pylist(rows)
        out = io.BytesIO()
        pq.write_table(table, out, row_group_size=rng.choice([1, 15, 1000]))
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError, KeyError):
        return mutate_bytes(data, rng)  # a column cannot hold values of several types
    return out.getvalue()


def mutate_text(data, rng):
    """Change encoding, line ends or length, or insert bytes that are not text."""
    text, at = data.decode(), rng.randrange(len(data))
    return rng.choice(
        [
            *(text.encode(name) for name in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")),
            text.replace("\n", rng.choice(["\r\n", "\r", "", "\0", "\u2028"])).encode(),
            data[:at] + rng.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"<|endoftext|>"]) + data[at:],
            data.replace(b" ", b""), data * 9, b"", b" \n" * 1000, b"a" * 10**4,
        ]
    )  # fmt: skip


def mutate_checkpoint(data, rng):
    """Change a value and save it with torch.save, so that the checksums are right."""
    nan = torch.full((32, 32), float("nan"))
    tensors = torch.zeros(0), torch.zeros(3), nan, nan.bool(), torch.zeros(1).to_sparse()
    tree = torch.load(io.BytesIO(data), weights_only=True)
    tree = mutate_tree(tree, rng, [*ODD, *tensors])
    torch.save(tree, out := io.BytesIO())
    return out.getvalue()


def mutate_bytes(data, rng):
    """Change bits, bytes or blocks, more often near the beginning and end, where headers are."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        size, n = len(data), rng.choice([1, 2, 8, 64, 1000])
        near = min(size, 200)
        at = rng.choice([rng.randrange(size), rng.randrange(near), size - 1 - rng.randrange(near)])
        block = data[at : at + n]
        number = rng.choice([0, 1, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1])
        end, new = rng.choice(
            [
                (at + 1, bytes([data[at] ^ 1 << rng.randrange(8)])),
                (size, b""),
                (at, rng.randbytes(n)),
                (at, block * rng.choice([1, 100])),
                (at + n, bytes(len(block))),
                (at + n, b""),
                (at + 8, number.to_bytes(8, "little")),
            ]
        )
        data[at:end] = new
        if not data:
            break
    return bytes(data)
