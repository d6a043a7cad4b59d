"""Makes python/specloop/data/agreement_prompts.json: short prompts of many kinds, none of which the training may use.

python tests/make_agreement_prompts.py
"""

import json
from pathlib import Path

from make_copy_edits import DATED, LISTS, STORIES, person, tense

FILE = Path(__file__).parents[1] / "python/specloop/data/agreement_prompts.json"

CHAT = """
Why do cats purr?
What is the difference between a lake and a pond?
How do I remove a coffee stain from a white shirt?
Which is healthier, brown bread or white bread?
Can you recommend a hobby for rainy weekends?
How long does it take to learn the guitar?
What should I wear to a job interview at a bank?
Why is my tomato plant losing its leaves?
How can I make a long train journey less boring?
What is a good present for a ten year old who loves dinosaurs?
Do fish sleep?
Is it safe to eat the skin of a kiwi?
How do I tell my neighbour that his music is too loud?
What makes bread rise?
Why does the moon change its shape?
How often should I water a cactus?
What is the best way to store potatoes?
Tell me something surprising about octopuses.
How do noise cancelling headphones work?
Why do leaves turn red in autumn?
What can I cook with eggs, rice and spinach?
How do I train for my first ten kilometre run?
Why do we yawn?
What is the tallest building that you know of?
How do I start a conversation at a party?
Which instrument is easiest for an adult beginner?
What does it mean if a horse puts its ears back?
How can I save money on heating?
What was life like in a medieval town?
Why do onions make us cry?
""".strip().splitlines()

CODE = """
Write a Python function that checks whether a word is a palindrome.
Write a Python generator that yields the prime numbers.
Write a Python function that merges two sorted lists into one sorted list.
Write a regular expression that matches a date like 2024-05-31, and explain it.
Write a JavaScript function that removes duplicates from an array.
Write a Java method that counts the vowels in a string.
Write a C program that prints the multiplication table of seven.
Write a shell command that finds all files larger than ten megabytes.
Write an SQL query that finds the three most expensive products.
Write a Python class for a bank account with deposit and withdraw.
Write a Go function that reverses a slice of integers.
Write a Rust function that returns the sum of the even numbers in a slice.
Write HTML for a form with a name, an e-mail address and a button.
Write CSS that centres a box in the middle of the page.
Write a Python script that renames all .jpeg files in a folder to .jpg.
Explain what this does: sorted(words, key=len)[-1]
Explain what this does: [x for x in range(50) if x % 7 == 0]
Explain what this does: while n: n, r = divmod(n, 2)
Find the bug: def mean(xs): return sum(xs) / len(xs) - 1
Find the bug: for (int i = 0; i <= n; i++) total += a[i];
Find the bug: if x = 3: print("three")
Add type hints: def area(width, height): return width * height
Add a docstring: def clamp(x, low, high): return max(low, min(x, high))
Write a unit test for a function that turns Celsius into Fahrenheit.
Turn this loop into a list comprehension: for x in a: if x > 0: b.append(x * x)
""".strip().splitlines()

EXPLAIN = """
Explain in two sentences how a bicycle stays upright.
Explain to a child of eight what inflation is.
Explain in simple words how vaccines work.
Explain with an example what a prime number is.
Explain step by step how a lock on a canal works.
Explain in two sentences why metal feels colder than wood.
Explain to a child of eight what photosynthesis is.
Explain in simple words how a refrigerator cools.
Explain with an example what recursion is.
Explain step by step how bees make honey.
Explain in two sentences why the days are longer in summer.
Explain to a child of eight what a shadow is.
Explain in simple words how an echo comes about.
Explain with an example what a leap year is.
Explain step by step how glaciers form.
Explain in two sentences why salt melts ice.
Explain to a child of eight what a budget is.
Explain in simple words how a compass works.
Explain with an example why ships of steel float.
Explain step by step why tides come and go.
""".strip().splitlines()

CLASSIFY = [
    *(
        f"Is this review positive or negative? Answer with one word.\n\n{text}"
        for text in (
            "The room was clean and the breakfast was the best we ever had.",
            "After two days the zip broke, and nobody answered my letters.",
            "I could not put the book down until three in the morning.",
            "The soup was cold, the waiter was rude, and it took an hour.",
            "A quiet film, slow in the best sense, with a wonderful ending.",
            "It does what it should, but the noise is unbearable.",
            "My son has used these shoes every day for a year, and they look like new.",
            "The guide forgot half of the tour and blamed the weather.",
        )
    ),
    *(
        f"Which topic fits best: sport, politics, science or weather?\n\n{text}"
        for text in (
            "The minister will present the new law on Tuesday.",
            "Heavy snow is expected above a thousand metres.",
            "The visitors equalised in the last minute of the match.",
            "Researchers found traces of water in the old rock.",
            "Both candidates met for a debate in the capital.",
            "A warm wind from the south brings dust from the desert.",
            "She won the bronze medal in the long jump.",
            "The telescope has recorded a signal from a distant star.",
        )
    ),
    *(
        f"Is this a question, a request or a statement?\n\n{text}"
        for text in ("Please close the gate behind you.", "The gate was closed at nine.", "Who closed the gate?")
    ),
]

MATHS = """
What is 17 times 6? Show the steps.
A train leaves at 8:40 and arrives at 11:15. How long does the journey take?
Three pens cost 4.50. What do seven pens cost?
How many minutes are there in a week?
What is a quarter of 260?
A garden is 12 metres long and 7 metres wide. What is its area?
Sort these numbers from small to large: 41, 7, 19, 88, 3, 56.
Round 3.14159 to two decimal places.
If today is Wednesday, what day is it in ten days?
Which of these numbers are even: 14, 27, 36, 51, 80?
Write 2024 in Roman numerals.
What is 15 percent of 80?
Convert 5 kilometres to metres and to miles.
How many edges does a cube have?
A recipe for four people needs 300 grams of flour. How much is needed for six?
""".strip().splitlines()

WRITE = """
Write a haiku about the first snow.
Write a polite e-mail that asks for a refund.
Write a short poem about a lazy cat.
Write a slogan for a shop that repairs umbrellas.
Write the first sentence of a detective story.
Write an invitation to a birthday party in the garden.
Write a note for a colleague who has done you a favour.
Write a complaint about a late delivery in three sentences.
Write a dialogue between a teacher and a pupil who is late.
Write a dialogue between the sun and the moon.
Write a weather report for an island that does not exist.
Write a job advertisement for a lighthouse keeper.
Write instructions for making a paper boat.
Write a bedtime story of five sentences about a brave snail.
Write a speech of thanks for a retiring gardener.
Write a product description of a wooden toy train.
Write a limerick about a baker from Dover.
Write a letter to your future self.
Write three riddles with their answers.
Write a toast for a wedding.
""".strip().splitlines()

NAME = """
Name five rivers in Europe.
Name four ways of cooking potatoes.
Name six animals that live in the desert.
Name three inventions of the nineteenth century.
Name five words that rhyme with light.
Name four planets and say one thing about each.
Name five things that one should not forget on a hike.
Name three advantages of working at home.
Name three disadvantages of living in a big city.
Name six fruits and their colours.
Name four musical instruments with strings.
Name five verbs that mean to walk.
Name three games that two people can play with a pencil and paper.
Name four famous bridges and where they are.
Name five kinds of cheese.
""".strip().splitlines()


def told(story, past=True):
    name, she, _, text = story
    return person(tense(text, past), she).replace("@", name)


def prompts():
    """(kind, prompt), in order."""
    found = {"chat": CHAT, "code": CODE, "explain": EXPLAIN, "classify": CLASSIFY, "maths": MATHS, "write": WRITE}
    found["name"] = NAME
    how = ("in one sentence", "in five words", "as a headline", "for a child")
    found["summarise"] = [f"Summarise {how[i % 4]}: {told(story)}" for i, story in enumerate(STORIES)]
    ask = ("What does {} do for a living?", "Give this text a title.", "Where does {} work?", "List the verbs in it.")
    found["extract"] = [
        f"{told(story, past=False)}\n\n{ask[i % 4].format(story[0])}" for i, story in enumerate(STORIES)
    ]
    found["continue"] = [
        f"Continue this story with two sentences: {' '.join(told(story).split('. ')[:1])}." for story in STORIES
    ]
    found["edit"] = [f"Write these items in reverse order, one per line: {text}" for _, text in LISTS] + [
        f"Repeat this text in capital letters: {told(story).split('. ')[0]}." for story in STORIES
    ]
    found["dates"] = [
        f"Which years does this text name? {text.format(*(date[0] for date in dates))}" for text, dates in DATED
    ]
    return [(kind, prompt) for kind, some in found.items() for prompt in some]


def as_text():
    rows = (json.dumps({"category": kind, "prompt": prompt}, ensure_ascii=False) for kind, prompt in prompts())
    return "[\n" + ",\n".join(rows) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(as_text(), encoding="utf-8")
    print(f"{len(prompts())} prompts, {FILE.stat().st_size} bytes: {FILE}")
