"""A small language of questions, each answered by one of its words: a tiny model can learn it."""

import random
from pathlib import Path

from builders import data as made_data
from builders.observations import cpu
from trials.records.cell import Cell
from trials.records.learning import LearnExample, LearnSetup, Training
from trials.records.model import find_model

ANIMALS = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "duck": "quack",
    "horse": "neigh",
    "frog": "croak",
}
NAMES = ("Ada", "Boris", "Dmitri", "Emeka", "Fumiko", "Greta", "Hassan", "Ines")
PLACES = ("barn", "garden", "field", "forest", "kitchen", "yard", "market", "river")
VERBS = ("sees", "feeds", "follows", "hears", "paints", "buys")
SOUNDS = sorted(ANIMALS.values())


def questions(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Different questions with their answers, and all sounds as choices."""
    every = [
        (name, verb, animal, place)
        for name in NAMES
        for verb in VERBS
        for animal in ANIMALS
        for place in PLACES
    ]
    random.Random(seed).shuffle(every)
    return [
        {
            "question": f"{name} {verb} a {animal} in the {place}. What does it say?",
            "answer": ANIMALS[animal],
            "sounds": SOUNDS,
        }
        for name, verb, animal, place in every[:count]
    ]


def learn_examples(count: int, held_out: int) -> list[LearnExample]:
    """The questions as ``learn`` reads them, the first ones held out, half with choices."""
    return [
        LearnExample(
            held_out=place < held_out,
            prompt=f"{row['question']}\n",
            answer=str(row["answer"]),
            choices=tuple(SOUNDS) if place % 2 else (),
        )
        for place, row in enumerate(questions(count))
    ]


def made_tokenizer(folder: Path) -> Path:
    """A tokenizer trained on the questions."""
    texts = [f"{row['question']}\n{row['answer']}" for row in questions(300)]
    made_data.train_tokenizer(folder, texts)
    return folder


def learn_setup(
    folder: Path, cell: Cell, examples: list[LearnExample], **training: object
) -> LearnSetup:
    """Setup of a learning child; its tokenizer is in ``folder/tok``."""
    file = folder / "examples.jsonl"
    file.write_text("".join(f"{q.model_dump_json()}\n" for q in examples), encoding="utf-8")
    fields = {"learning_rate": 3e-3, "batch_size": 8, "epochs": 4, "cutoff": 64} | training
    return LearnSetup(
        cell=cell,
        model=find_model(cell.model),
        gpu=cpu(),
        seed=0,
        threads=1,
        training=Training.model_validate(fields),
        tokenizer=str(folder / "tok"),
        examples_file=str(file),
        curve=cell.key,
        checkpoint_file=str(folder / "state.pt"),
    )
