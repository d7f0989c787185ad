"""Things sorted by kind: "Is an otter an animal, a food or a country?" Words and wordings are held out."""

from random import Random

from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.types import Task

KINDS = {
    "animal": """
        bear bee camel cat cow crab deer dog donkey duck eagle elephant fox frog goat goose horse lion
        monkey mouse owl pig rabbit shark sheep snake spider tiger turtle wolf""",
    "food": """
        apple bacon banana bread butter cake carrot cheese cherry chocolate cookie egg garlic grape ham
        honey lemon noodle onion pancake peach pear pizza potato pumpkin rice salad sausage soup yogurt""",
    "country": """
        Argentina Australia Austria Belgium Brazil Canada Chile China Cuba Denmark Egypt Finland France
        Germany Greece Hungary India Ireland Italy Japan Kenya Mexico Norway Peru Poland Portugal Russia
        Spain Sweden Vietnam""",
    "color": """
        azure beige black blue brown crimson cyan gray green indigo magenta maroon mauve pink purple red
        scarlet tan teal turquoise violet white yellow""",
}
SYSTEM = "Answer with one word."
TRAINING = (
    'Is "{word}" a kind of {a}, {b} or {c}?',
    'What is "{word}": {a}, {b} or {c}?',
    'Choose the right word for "{word}": {a}, {b} or {c}.',
    'Which of these is "{word}"? {a}, {b}, {c}.',
    'Here are three words: {a}, {b}, {c}. Which one fits "{word}"?',
    'A child asks what "{word}" is. Tell the child: {a}, {b} or {c}?',
    'Label "{word}" as {a}, {b} or {c}.',
    'There are shelves for {a}, {b} and {c}. On which one does "{word}" belong?',
    'Options: {a} / {b} / {c}. Item: "{word}".',
    'Complete with {a}, {b} or {c}: "{word}" is a kind of',
)
UNSEEN = (
    'Sort "{word}" into one of three boxes: {a}, {b}, {c}.',
    'Someone says "{word}". Do they mean a {a}, a {b} or a {c}?',
)


def correct(output, answer) -> float:
    """1 if the reply is the right word and no more; case and a full stop do not matter."""
    return float((output or "").strip().rstrip(".").lower() == answer)


class Words(Environment):
    """One word in three, and two of the twelve wordings, do not occur in training."""

    name = "words"
    rewards = (Reward("correct", correct),)

    def train_task(self, index):
        return self.task(f"train-{index}", self.words(held_out=False), TRAINING)

    def eval_sets(self):
        words = self.words(held_out=True)
        return {
            "": [self.task(f"words-{number}", words, TRAINING) for number in range(200)],
            "unseen_wordings": [self.task(f"wordings-{number}", words, UNSEEN) for number in range(200)],
        }

    def words(self, *, held_out):
        """Pairs of a word and its kind; the third, sixth, ninth … word of each kind is held out."""
        listed = [(kind, *one) for kind, words in KINDS.items() for one in enumerate(words.split())]
        return [(word, kind) for kind, number, word in listed if (number % 3 == 2) == held_out]

    def task(self, id, pairs, wordings):
        """Draws a word, two wrong kinds, their order and a wording; the same task for the same id."""
        rng = Random(f"words/{id}")
        word, kind = rng.choice(pairs)
        kinds = [kind, *rng.sample(sorted(KINDS.keys() - {kind}), 2)]
        rng.shuffle(kinds)
        question = rng.choice(wordings).format(word=word, **dict(zip("abc", kinds, strict=True)))
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return Task(id, self.name, messages, kind, info={"word": word, "kinds": kinds})
