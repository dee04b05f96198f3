"""Conversations about plain facts: our questions, and as answers what the target model itself says to them.

An EAGLE-3 head learns to say what its target would say, so the target's own greedy answers are what it is trained on; a
small model need not know a fact for that. The last fifth of the names of every kind is held out, so no question of the held-out
conversations is trained on.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

#: A line: names, whose questions have the same number in QUESTIONS.
NAMES = """
France Germany Italy Spain Portugal Poland Austria Hungary Greece Norway Sweden Finland Denmark Ireland Belgium Romania Bulgaria Croatia Iceland Japan China India Thailand Vietnam Indonesia Mongolia Nepal Pakistan Iran Iraq Turkey Israel Egypt Morocco Kenya Ghana Nigeria Ethiopia Senegal Uganda Canada Mexico Cuba Brazil Argentina Chile Peru Bolivia Ecuador Colombia Australia Malaysia Jordan Tunisia Serbia
hydrogen helium lithium carbon nitrogen oxygen neon sodium magnesium aluminium silicon phosphorus sulfur chlorine argon potassium calcium titanium chromium iron cobalt nickel copper zinc bromine krypton silver tin iodine gold mercury lead uranium platinum tungsten
dog cat horse cow sheep goat pig rabbit mouse wolf fox bear lion tiger elephant giraffe zebra camel deer squirrel owl eagle duck penguin sparrow frog snake spider ant bee butterfly shark salmon whale dolphin
hammer saw drill ladder shovel rake kettle oven spoon knife ruler compass telescope microscope thermometer barometer clock camera piano violin guitar drum bicycle tractor lighthouse
"""
QUESTIONS = (
    ("What is the capital of {}?", "On which continent is {}?", "Which language is spoken in {}?"),
    ("What is the chemical symbol of {}?", "Is {} a metal?", "What is {} used for?"),
    ("How many legs does a {} have?", "What does a {} eat?", "Where does a {} live?"),
    ("What is a {} used for?", "Who uses a {}?"),
)


def questions(count: int, seed: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    """``count`` conversations of two questions for training, and a quarter as many about other things, held out."""
    rng = random.Random(seed)
    sets: tuple[list[list[str]], list[list[str]]] = [], []
    for templates, line in zip(QUESTIONS, NAMES.strip().splitlines(), strict=True):
        names = line.split()
        shuffled = rng.sample(names, len(names))
        cut = len(names) * 4 // 5
        for place, part in enumerate((shuffled[:cut], shuffled[cut:])):
            for name in part:
                for first in templates:
                    second = rng.choice([template for template in templates if template != first])
                    sets[place].append([first.format(name), second.format(name)])
    return rng.sample(sets[0], count), rng.sample(sets[1], count // 4)


def answer(model_path: str, asked: list[list[str]], max_tokens: int) -> list[list[dict[str, str]]]:
    """Whole conversations: vLLM answers question after question, greedily."""
    from vllm import LLM, SamplingParams

    llm = LLM(model_path, max_model_len=1024, seed=0, enforce_eager=True, block_size=16)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    talks: list[list[dict[str, str]]] = [[] for _ in asked]
    for turn in range(len(asked[0])):
        for talk, texts in zip(talks, asked, strict=True):
            talk.append({"role": "user", "content": texts[turn]})
        for talk, output in zip(talks, llm.chat(talks, sampling, use_tqdm=False), strict=True):
            talk.append({"role": "assistant", "content": output.outputs[0].text.strip() or "I do not know."})
    return talks


def write(path: Path, talks: list[list[dict[str, str]]]) -> None:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")


def read(path: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
