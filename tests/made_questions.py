"""A small language of questions whose answers follow from one word: what a tiny model can learn."""

import random

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
