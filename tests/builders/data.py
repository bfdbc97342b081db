"""A small data set of written questions and answers, and a tokenizer trained on it."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

NAMES = ("Ada", "Boris", "Chloé", "Dmitri", "Emeka", "Fumiko")
THINGS = ("apples", "marbles", "tickets", "pencils", "cards", "eggs")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message['role'] + ' here') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
)

Row = dict[str, str]


def rows(count: int, seed: int = 0) -> list[Row]:
    """Word problems, most of them short, a few of them long."""
    draw = random.Random(seed)
    problems = []
    for _ in range(count):
        name, thing = draw.choice(NAMES), draw.choice(THINGS)
        have, days = draw.randint(2, 90), 1 + int(draw.expovariate(0.4))
        parts, left = [f"{name} has {have} {thing}."], have
        for day in range(days):
            more = draw.randint(1, 30)
            left += more
            parts.append(f"On day {day + 1}, {name} buys {more} more {thing}.")
        question = " ".join([*parts, f"How many {thing} does {name} have?"])
        answer = "\n".join([f"{name} has {left} {thing}.", f"#### {left}"])
        problems.append({"question": question, "answer": answer})
    return problems


def write_jsonl(path: Path, records: Sequence[object]) -> Path:
    """Write one JSON object per line."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in records)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_csv(path: Path, records: Sequence[Row], delimiter: str = ",") -> Path:
    """Write a CSV with a header; texts of several lines are quoted."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(records)
    return path


def train_tokenizer(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """A trained byte-level tokenizer that neither truncates nor pads.

    Its saved copy is set to truncate and pad, as those of published models are.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=20)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
