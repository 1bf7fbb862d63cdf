"""Evaluate fine-tuning on conversations: loss and correct answers on held-out conversations.

    python bench/chats.py log/RUN log/TUNED              # before and after, on lines 1, 11, 21 ...
    python bench/chats.py --tenth 1 log/TUNED            # on a tenth of the training conversations
    python bench/chats.py --tenth 1 --temperature 0.5 log/TUNED
    python bench/chats.py --out chats.jsonl --show 5 log/TUNED

In the data, "facts" has one text per answer: alternatives separated by |, one of which the answer must
contain. Answers are generated from the question and the reference turns before it, greedily unless
--temperature is given. An answer is right if it contains the fact, and counts as ended if the model
writes end-of-text or the next role. The baseline is the chance that a reference answer taken at random
from another conversation contains the fact. Conversations longer than a model's context are skipped and
counted.
"""

import re
from dataclasses import dataclass
from typing import Annotated

import torch
from records import append_record, origin, print_rows
from tyro.conf import Positional, arg

from lab.cli import parse_args, require, run_main
from lab.data.chat import STOP_STRINGS, records_in, render_chat
from lab.data.sources import local_files
from lab.distributed import World
from lab.inference.streaming import load_for_inference, stream_generate
from lab.registry import resolve_source


@dataclass
class Config:
    model: Annotated[tuple[str, ...], Positional, arg(metavar="[RUN ...]")] = ()
    data: str = "examples/chats.jsonl"  # conversations with facts
    tenth: int = 0  # 0: the held-out tenth; 1 to 9: a tenth used for training
    max_new_tokens: int = 64  # maximum length of an answer
    temperature: float = 0.0  # 0: greedy; otherwise four answers to each question, with top-k 50
    show: int = 0  # number of questions and answers to print
    out: str = ""  # append the measurements to this file
    device: str = "auto"  # cuda, mps or cpu


def plain(text):
    """Normalize a text: lower case, 50257 for 50,257, 24% for 24 %."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.casefold()).replace(" %", "%")


def holds(answer, fact):
    """Whether an answer contains one of the alternatives as a whole word: 124M and 12.5 don't contain 12."""
    words = (re.escape(plain(word)) for word in fact.split("|"))
    return re.search(rf"(?<![\w.])({'|'.join(words)})(?!\w|\.\d)", plain(answer)) is not None


def turns(chat):
    """(previous messages, answer, fact) for each answer of a conversation."""
    places = [i for i, m in enumerate(chat["messages"]) if m["role"] == "assistant"]
    return [
        (chat["messages"][:i], chat["messages"][i]["content"], fact)
        for i, fact in zip(places, chat["facts"], strict=True)
    ]


@torch.no_grad()
def loss_of(model, tokenizer, chat):
    """(summed loss in nats, number) of the assistant's tokens in a conversation."""
    ids, mask = render_chat(chat["messages"], tokenizer)
    idx = torch.tensor(ids.tolist(), device=next(model.parameters()).device)
    targets = idx.masked_fill(torch.tensor(mask, device=idx.device) == 0, -1)[1:]
    _, loss = model(idx[None, :-1], targets[None], reduction="sum")
    return loss.item(), int(mask.sum())


def answer(model, tokenizer, messages, cfg, seed):
    """(the model's answer, whether it ended before cfg.max_new_tokens)."""
    ids = render_chat(messages, tokenizer, add_generation_prompt=True)[0].tolist()
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    said = list(
        stream_generate(
            model,
            tokenizer,
            ids,
            cfg.max_new_tokens,
            stop=STOP_STRINGS,
            no_sliding_window=True,
            temperature=cfg.temperature,
            top_k=50,
            generator=generator,
        )
    )
    return "".join(piece["text"] for piece in said).strip(), said[-1]["end"] == "stop"


def measure(model, tokenizer, asked, cfg):
    """(the record of a model, [(question, answer, reference answer) of each turn])."""
    room = model.config.block_size
    fits = [c for c in asked if len(render_chat(c["messages"], tokenizer)[0]) <= room]
    nats, tokens = map(sum, zip(*(loss_of(model, tokenizer, chat) for chat in fits)))
    rows, right, ended = [], [], []
    for before, wanted, fact in (turn for chat in fits for turn in turns(chat)):
        for seed in range(4 if cfg.temperature else 1):
            said, end = answer(model, tokenizer, before, cfg, seed)
            rows.append((before[-1]["content"], said, wanted))
            right.append(holds(said, fact))
            ended.append(end)
    record = dict(loss=nats / tokens, right=sum(right) / len(right), ended=sum(ended) / len(ended))
    return record | dict(answers=len(right), left_out=len(asked) - len(fits)), rows


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    require(0 <= cfg.tenth < 10, f"tenth={cfg.tenth} must be from 0 to 9")
    chats = [chat for _, chat in records_in(local_files(cfg.data))]
    without = sum(not {"messages", "facts"} <= chat.keys() for chat in chats)
    require(
        not without,
        f'{without} of the {len(chats)} conversations in {cfg.data} lack "messages" or "facts", a list of '
        "what each answer must contain; add them, as in examples/chats.jsonl",
    )
    asked, rest = chats[cfg.tenth :: 10], [c for i, c in enumerate(chats) if i % 10 != cfg.tenth]
    others = [said for chat in rest for _, said, _ in turns(chat)]
    facts = [fact for chat in asked for *_, fact in turns(chat)]
    chance = sum(holds(said, fact) for fact in facts for said in others) / len(facts) / len(others)
    table = [("random reference answer", "", f"{chance:.1%}", "", len(facts), "")]
    device = World(cfg.device).device
    for name in cfg.model:
        model, tokenizer = load_for_inference(resolve_source(name), device, "fp32")
        found, rows = measure(model, tokenizer, asked, cfg)
        shares = (f"{found[key]:.1%}" for key in ("right", "ended"))
        table.append((name, f"{found['loss']:.3f}", *shares, found["answers"], found["left_out"]))
        for question, said, wanted in rows[: cfg.show]:
            print(f"{question}\n    {said!r}\n    reference: {wanted}")
        about = dict(bench="chats", data=cfg.data, tenth=cfg.tenth, model=name, device=str(device))
        about["temperature"] = cfg.temperature
        if cfg.out:
            append_record(cfg.out, about | found | dict(chance=chance) | origin())
    print_rows(("model", "nats", "right", "ended", "answers", "chats skipped"), table)


if __name__ == "__main__":
    run_main(main)
