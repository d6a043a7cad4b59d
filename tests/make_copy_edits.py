"""Makes python/specloop/data/copy_edit.json: texts with a small, mechanical edit each, and what comes out of it.

    python tests/make_copy_edits.py

The stories are written twice at once: [present|past], <he|she>, @ for the name. All is fixed, nothing is drawn.
"""

import calendar
import json
import re
from pathlib import Path

FILE = Path(__file__).parents[1] / "python/specloop/data/copy_edit.json"

# (name, whether it is a she, another name, the story)
STORIES = [
    (
        "Anna",
        True,
        "Maria",
        "@ [gets|got] up at four in the morning and [walks|walked] to the bakery on the corner. <He|She> [lights|lit] "
        "the oven, [weighs|weighed] the flour and [kneads|kneaded] the dough for the rolls. At six the first customers "
        "[stand|stood] at the door, and @ [sells|sold] them bread that [is|was] still warm. In the afternoon <he|she> "
        "[sleeps|slept] for two hours.",
    ),
    (
        "Peter",
        False,
        "Martin",
        "@ [steers|steered] the ferry between the two islands. Before each trip <he|she> [checks|checked] the engine "
        "and [counts|counted] the passengers. When fog [comes|came] up, @ [sounds|sounded] the horn and [slows|slowed] "
        "down until the lighthouse [appears|appeared]. <His|Her> dog [lies|lay] beside the wheel and [barks|barked] at "
        "every gull that [flies|flew] past the window.",
    ),
    (
        "Clara",
        True,
        "Judith",
        "@ [teaches|taught] mathematics at a small school in the hills. <He|She> [begins|began] every lesson with a "
        "riddle and [writes|wrote] it on the board. The children [think|thought] about it in pairs, and whoever "
        "[finds|found] the answer [explains|explained] it to the others. On Fridays @ [brings|brought] a chessboard, "
        "and nobody [wants|wanted] to go home.",
    ),
    (
        "Thomas",
        False,
        "Oliver",
        "@ [looks|looked] after the old garden behind the museum. In spring <he|she> [plants|planted] beans and peas, "
        "and in summer <he|she> [waters|watered] them every evening. Visitors [ask|asked] <him|her> about the roses "
        "along the wall. @ [knows|knew] the name of each of them and [tells|told] people who [bred|had bred] it and in "
        "which year.",
    ),
    (
        "Laura",
        True,
        "Helen",
        "@ [works|worked] as a nurse in the night shift of a large hospital. <He|She> [goes|went] from room to room, "
        "[measures|measured] the temperature of the patients and [writes|wrote] it down. If somebody [cannot|could "
        "not] sleep, @ [sits|sat] down beside the bed and [listens|listened]. At dawn <he|she> [drinks|drank] a cup of "
        "tea and [watches|watched] the first trams.",
    ),
    (
        "Daniel",
        False,
        "Victor",
        "@ [delivers|delivered] letters in four villages by bicycle. <He|She> [knows|knew] every dog on the way and "
        "[carries|carried] biscuits for them in <his|her> left pocket. When it [rains|rained], @ [wraps|wrapped] the "
        "letters in a sheet of plastic. The people [wave|waved] from their kitchens, and on Saturdays the miller "
        "[gives|gave] <him|her> a bag of flour.",
    ),
    (
        "Sophie",
        True,
        "Emily",
        "@ [repairs|repaired] clocks in a narrow shop near the bridge. Each clock [gets|got] a label with a number, "
        "and <he|she> [writes|wrote] in a thick book what [is|was] wrong with it. The work [takes|took] patience, for "
        "some wheels [are|were] smaller than a grain of rice. At noon all clocks [strike|struck] together, and @ "
        "[stops|stopped] to listen.",
    ),
    (
        "Robert",
        False,
        "Edward",
        "@ [studies|studied] geology and [spends|spent] most of <his|her> time outdoors. With a hammer <he|she> "
        "[breaks|broke] small pieces from the rocks and [puts|put] them into bags. In the evening @ [looks|looked] at "
        "them under a lamp and [draws|drew] their layers. The oldest stone in <his|her> collection [comes|came] from "
        "a quarry in the north.",
    ),
    (
        "Martha",
        True,
        "Irene",
        "@ [keeps|kept] twelve goats and a donkey on a farm above the lake. <He|She> [milks|milked] the goats before "
        "breakfast and [makes|made] cheese from the milk. Twice a week @ [drives|drove] to the market and [sells|sold] "
        "it there. The donkey [carries|carried] hay from the upper meadow and [stops|stopped] at every thistle that it "
        "[sees|saw].",
    ),
    (
        "George",
        False,
        "Henry",
        "@ [runs|ran] the library of a little town. <He|She> [orders|ordered] the books, [mends|mended] torn pages and "
        "[reads|read] stories to children on Wednesday afternoons. A student [comes|came] every day and [sits|sat] by "
        "the window until the lights [go|went] out. @ [leaves|left] <his|her> door open, so that everyone [can|could] "
        "ask a question.",
    ),
    (
        "Nadia",
        True,
        "Elena",
        "@ [trains|trained] for a race across the mountains. Every second day <he|she> [rides|rode] sixty kilometres "
        "on <his|her> bicycle and [climbs|climbed] two passes. On the other days @ [swims|swam] in the river or "
        "[rests|rested]. A friend [drives|drove] behind <him|her> with water and bananas, and in the evening they "
        "[talk|talked] about the next route.",
    ),
    (
        "Simon",
        False,
        "Lucas",
        "@ [cooks|cooked] for the guests of a mountain hut. In the morning <he|she> [fetches|fetched] water from the "
        "spring and [peels|peeled] potatoes. Hikers [arrive|arrived] about noon, tired and hungry, and @ [serves|"
        "served] them soup with bread. When the last guest [sleeps|slept], <he|she> [washes|washed] the pots and "
        "[looks|looked] at the stars for a while.",
    ),
    (
        "Julia",
        True,
        "Karen",
        "@ [builds|built] bridges in a country with many rivers. First <he|she> [measures|measured] how deep the water "
        "[is|was] and how fast it [flows|flowed]. Then @ [draws|drew] the pillars and [calculates|calculated] what "
        "they [have|had] to carry. The workers [trust|trusted] <him|her>, because <he|she> [walks|walked] over every "
        "bridge before anybody else.",
    ),
    (
        "Walter",
        False,
        "Arthur",
        "@ [takes|took] pictures of birds for a magazine. <He|She> [waits|waited] for hours in a tent near the reeds "
        "and [hardly moves|hardly moved]. When a heron [lands|landed], @ [holds|held] <his|her> breath and [presses|"
        "pressed] the button. Most of the pictures [are|were] blurred, but once in a month one [turns|turned] out so "
        "well that it [goes|went] on the cover.",
    ),
    (
        "Alice",
        True,
        "Diana",
        "@ [owns|owned] a small shop that [sells|sold] paper and pens. <He|She> [opens|opened] at nine and [sweeps|"
        "swept] the pavement first. School children [come|came] for notebooks, and an old writer [buys|bought] a "
        "bottle of blue ink every month. In December @ [decorates|decorated] the window with paper stars, which "
        "<he|she> [folds|folded] behind the counter.",
    ),
    (
        "Felix",
        False,
        "Hugo",
        "@ [plays|played] the piano in a hotel by the sea. In the afternoon <he|she> [practises|practised] alone, and "
        "in the evening <he|she> [plays|played] whatever the guests [ask|asked] for. A couple from the third floor "
        "always [wants|wanted] the same waltz. @ [smiles|smiled], [turns|turned] a page that <he|she> [does|did] not "
        "need and [begins|began] once more.",
    ),
]

# [British|American]
REGIONS = [
    "The [colour|color] of the new theatre caused a long quarrel among the [neighbours|neighbors]. Some found the "
    "[grey|gray] walls dull, others praised their modest [humour|humor]. In the end the [councillor|councilor] for "
    "building matters [organised|organized] a vote, and a warm yellow won by a narrow margin of nine votes.",
    "Our laboratory will [analyse|analyze] the samples from the [harbour|harbor] next week. Please [fulfil|fulfill] "
    "all the safety rules and wear [grey|gray] gloves. The fluid has an unpleasant [odour|odor] and [vapour|vapor] may "
    "rise from it. We [apologise|apologize] for the delay and thank you for your patience.",
    "She [travelled|traveled] through the country with a camera and one bag. In every town she asked for the "
    "[favourite|favorite] dish of the people there and [recognised|recognized] how much their cooking had in common. "
    "Her [catalogue|catalog] of recipes fills three notebooks, and she has [labelled|labeled] each page with a small "
    "drawing.",
    "The [labour|labor] of many hands built this wall. Farmers [ploughed|plowed] up the stones, children gathered them "
    "in baskets, and masons [honoured|honored] the old custom of working without mortar. A [mould|mold] of wood gave "
    "the arch its shape until the last stone had been set in its [centre|center].",
    "Visitors should [realise|realize] that the [jewellery|jewelry] in the second room is very old. Its [splendour|"
    "splendor] has not faded, although a fire in the [theatre|theater] next door once filled the hall with smoke. We "
    "kindly ask you not to touch the glass and to speak in a low voice so as not to disturb [neighbouring|neighboring] "
    "guests.",
    "The football club [criticised|criticized] the [behaviour|behavior] of a few supporters after the match. Its "
    "president said that he would [favour|favor] stricter checks and that the club would [emphasise|emphasize] fair "
    "play from now on. A [programme|program] for young fans is to begin in autumn, with a coach who has [counselled|"
    "counseled] many of them before.",
]

# (language, old name, new name, code with @)
CODE = [
    (
        "Python",
        "total",
        "amount",
        "def price(items, discount):\n    @ = 0\n    for item in items:\n        @ += item.price * item.count\n"
        "    if @ > 100:\n        @ -= @ * discount\n    print('to pay:', @)\n    return round(@, 2)",
    ),
    (
        "Python",
        "lines",
        "rows",
        "def longest(path):\n    with open(path) as file:\n        @ = file.read().splitlines()\n    if not @:\n"
        "        return None\n    best = @[0]\n    for line in @[1:]:\n        if len(line) > len(best):\n"
        "            best = line\n    print(len(@), 'read')\n    return best",
    ),
    (
        "Python",
        "node",
        "current",
        "def find(root, key):\n    @ = root\n    while @ is not None:\n        if key == @.key:\n            return @\n"
        "        if key < @.key:\n            @ = @.left\n        else:\n            @ = @.right\n    return @",
    ),
    (
        "Python",
        "counts",
        "histogram",
        "def most_common(words, n):\n    @ = {}\n    for word in words:\n        word = word.lower()\n"
        "        @[word] = @.get(word, 0) + 1\n    ranked = sorted(@, key=@.get, reverse=True)\n"
        "    return [(word, @[word]) for word in ranked[:n]]",
    ),
    (
        "Python",
        "queue",
        "waiting",
        "def distances(graph, start):\n    seen = {start: 0}\n    @ = [start]\n    while @:\n        node = @.pop(0)\n"
        "        for other in graph[node]:\n            if other not in seen:\n"
        "                seen[other] = seen[node] + 1\n"
        "                @.append(other)\n    return seen",
    ),
    (
        "JavaScript",
        "result",
        "answer",
        "function join(parts, separator) {\n  let @ = '';\n  for (const part of parts) {\n    if (@.length > 0) {\n"
        "      @ += separator;\n    }\n    @ += String(part);\n  }\n  console.log(@.length, 'characters');\n"
        "  return @;\n}",
    ),
    (
        "JavaScript",
        "user",
        "account",
        "async function greet(id) {\n  const @ = await load(id);\n  if (!@ || !@.active) {\n"
        "    return 'Hello, guest!';\n"
        "  }\n  const hours = (Date.now() - @.lastVisit) / 3600000;\n  @.lastVisit = Date.now();\n  await save(@);\n"
        "  return `Hello, ${@.name}, it has been ${hours} hours.`;\n}",
    ),
    (
        "C",
        "sum",
        "checksum",
        "unsigned adler(const unsigned char *data, int size) {\n    unsigned @ = 1, other = 0;\n"
        "    for (int i = 0; i < size; i++) {\n        @ = (@ + data[i]) % 65521;\n"
        "        other = (other + @) % 65521;\n"
        "    }\n    return (other << 16) | @;\n}",
    ),
    (
        "C",
        "left",
        "low",
        "int search(const int *values, int size, int wanted) {\n    int @ = 0, right = size - 1;\n"
        "    while (@ <= right) {\n        int middle = @ + (right - @) / 2;\n        if (values[middle] == wanted)\n"
        "            return middle;\n        if (values[middle] < wanted)\n            @ = middle + 1;\n        else\n"
        "            right = middle - 1;\n    }\n    return -1;\n}",
    ),
    (
        "Java",
        "balance",
        "funds",
        "class Account {\n    private int @ = 0;\n\n    void deposit(int cents) {\n        @ += cents;\n    }\n\n"
        "    boolean withdraw(int cents) {\n        if (cents > @) {\n            return false;\n        }\n"
        "        @ -= cents;\n        return true;\n    }\n\n    int get() {\n        return @;\n    }\n}",
    ),
    (
        "SQL",
        "orders",
        "purchases",
        "SELECT customers.name, COUNT(*) AS number, SUM(@.price) AS total\nFROM customers\n"
        "JOIN @ ON @.customer = customers.id\nWHERE @.year = 2024\n  AND @.cancelled = 0\n"
        "GROUP BY customers.name\nHAVING SUM(@.price) > 500\nORDER BY total DESC;",
    ),
    (
        "Go",
        "words",
        "tokens",
        "func initials(text string) string {\n\t@ := strings.Fields(text)\n\tletters := make([]byte, 0, len(@))\n"
        "\tfor _, word := range @ {\n\t\tletters = append(letters, word[0])\n\t}\n"
        '\tif len(@) == 0 {\n\t\treturn "?"\n\t}\n\treturn strings.ToUpper(string(letters))\n}',
    ),
    (
        "Rust",
        "best",
        "highest",
        "fn maximum(values: &[i64]) -> Option<i64> {\n    let mut @ = *values.first()?;\n    for &value in values {\n"
        "        if value > @ {\n            @ = value;\n        }\n    }\n    if @ < 0 {\n"
        '        println!("all are negative, the largest is {}", @);\n    }\n    Some(@)\n}',
    ),
    (
        "shell",
        "folder",
        "target",
        '@=$1\nif [ ! -d "$@" ]; then\n  echo "cannot find $@" >&2\n  exit 1\nfi\nfor file in "$@"/*.txt; do\n'
        '  lines=$(wc -l < "$file")\n  echo "$file has $lines lines"\ndone\necho "done with $@"',
    ),
]

LISTS = [
    (
        "what to pack for a week in the mountains",
        "two pairs of warm socks, a map of the northern valley, a bottle for drinking water, matches in a dry box, "
        "a torch with new batteries, dark bread and hard cheese, a small knife, a rain jacket with a hood",
    ),
    (
        "the tasks of the caretaker in winter",
        "clear the snow from the steps, spread sand on the paths, check the heating in the cellar, replace "
        "broken bulbs "
        "in the hall, empty the letter boxes of absent tenants, lock the back door at ten, feed the birds in the yard",
    ),
    (
        "the ingredients of the vegetable soup",
        "three large carrots, half a head of celery, two leeks from the garden, one litre of clear stock, a spoon of "
        "olive oil, four ripe tomatoes without skin, a handful of green beans, salt and black pepper, a "
        "bunch of parsley",
    ),
    (
        "the rooms of the town museum",
        "the hall with the old coaches, the room of the weavers, a kitchen from the year 1820, the collection of "
        "painted clocks, the tower with a view of the river, a workshop for children, the archive in the cellar",
    ),
    (
        "the stops of the bus on line seven",
        "the main station, the square in front of the town hall, the hospital by the park, the swimming pool, the "
        "school on the hill, the cemetery gate, the brick factory, the bridge over the canal, the terminus at the mill",
    ),
    (
        "the points of the meeting on Thursday",
        "the report of the treasurer, the repair of the roof, a date for the summer party, new members and their "
        "sponsors, the broken lawn mower, the letter from the mayor, a vote on the opening hours, any other questions",
    ),
    (
        "the birds that were counted at the lake",
        "forty grey geese, nine herons among the reeds, two white storks, a pair of black swans, many young ducks, one "
        "kingfisher near the inflow, seven cormorants on dead trees, three buzzards above the meadow",
    ),
    (
        "what the workshop needs next month",
        "six sheets of plywood, a box of brass screws, two litres of white paint, sandpaper in three grades, a new "
        "blade for the saw, wood glue that dries slowly, gloves in medium size, a dozen soft pencils",
    ),
    (
        "the rules of the reading room",
        "leave your coat at the entrance, speak only in a whisper, use pencils and no ink, wash your hands before "
        "touching old prints, do not eat or drink, return each volume to the desk, ask before you take a photograph",
    ),
    (
        "the courses of the evening school",
        "Spanish for beginners on Monday, book-keeping with a computer, drawing from nature, first aid in "
        "two evenings, "
        "the history of our valley, repairing bicycles in the yard, cooking with herbs, singing without sheet music",
    ),
    (
        "the animals on the farm of the old couple",
        "eleven brown hens, a proud rooster with a green tail, two goats that climb on everything, one grey donkey, a "
        "dozen sheep on the hill, a cat with four kittens, bees in three hives, a dog that fears thunder",
    ),
    (
        "the sights along the walk through the old town",
        "the gate of the tanners, a house with a golden bear, the fountain of the four winds, the crooked tower, the "
        "narrowest lane of the region, the market hall made of iron, a garden behind high walls, the little harbour",
    ),
]

MONTHS = list(calendar.month_name)[1:]  # English unless a locale was set, which nothing here does
# dates as (year, month, day)
DATED = [
    (
        "The foundation stone was laid on {}, and the roof was finished on {}. After a fire on {} the whole "
        "building had "
        "to be cleared. It was opened again on {} with a concert to which all the neighbours came.",
        [(1998, 3, 14), (2001, 10, 2), (2009, 8, 27), (2012, 5, 6)],
    ),
    (
        "Your order was received on {} and left our store on {}. The parcel will probably reach you on {}. "
        "If it has not "
        "come by {}, please write to us and name the number of the order, so that we can look for it.",
        [(2023, 11, 3), (2023, 11, 6), (2023, 11, 9), (2023, 11, 16)],
    ),
    (
        "The comet was first seen on {} by a shepherd. On {} it could be seen without a telescope, and on {} its tail "
        "was at its longest. The last report of it is dated {} and comes from an observatory in Chile.",
        [(1881, 2, 19), (1881, 6, 1), (1881, 6, 24), (1882, 1, 8)],
    ),
    (
        "Courses begin on {} and end on {}. You can register until {}. Those who cancel after {} have to pay "
        "half of the "
        "fee, unless somebody else takes their place. The school stays closed on public holidays.",
        [(2025, 9, 15), (2026, 2, 28), (2025, 8, 31), (2025, 9, 7)],
    ),
    (
        "The bridge was inspected on {}, and small cracks were found. A second look on {} showed that they had grown. "
        "Heavy traffic has been banned since {}. Repairs are planned to start on {} and will take about ten weeks.",
        [(2021, 4, 12), (2022, 4, 20), (2022, 5, 2), (2022, 7, 11)],
    ),
    (
        "She was born on {} in a village on the coast. On {} she gave her first concert, and her first record appeared "
        "on {}. She played in public for the last time on {}, in the same small hall in which she had begun.",
        [(1921, 12, 5), (1936, 6, 17), (1949, 9, 30), (1988, 3, 25)],
    ),
]
FORMS = {
    "2021-04-12": lambda y, m, d: f"{y}-{m:02}-{d:02}",
    "12 April 2021": lambda y, m, d: f"{d} {MONTHS[m - 1]} {y}",
    "April 12, 2021": lambda y, m, d: f"{MONTHS[m - 1]} {d}, {y}",
}
DATE_EDITS = [("2021-04-12", "12 April 2021"), ("12 April 2021", "2021-04-12"), ("12 April 2021", "April 12, 2021")]


def tense(text, past):
    return re.sub(r"\[([^|\]]*)\|([^\]]*)\]", lambda m: m[2 if past else 1], text)


def person(text, she):
    return re.sub(r"<(\w+)\|(\w+)>", lambda m: m[2 if she else 1], text)


def misspelled(text, every=5):
    """Every fifth word of five letters or more with a slip: a letter left out, two swapped, or one doubled."""
    words, long, slips = text.split(" "), 0, 0
    for i, word in enumerate(words):
        if not re.fullmatch(r"[a-z]{5,}[.,]?", word):
            continue
        long += 1
        if long % every:
            continue
        kind, at = slips % 3, 2
        while kind == 1 and word[at] == word[at + 1]:
            at += 1
        slips += 1
        words[i] = {
            0: word[:at] + word[at + 1 :],
            1: word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            2: word[:at] + word[at] + word[at:],
        }[kind]
    return " ".join(words)


def edits():
    def add(kind, instruction, text, reference):
        found.append({"kind": kind, "instruction": instruction, "input": text, "reference": reference})

    found = []
    for i, (name, she, other, story) in enumerate(STORIES):
        told = {past: person(tense(story, past), she).replace("@", name) for past in (False, True)}
        add("tense", "Rewrite this text in the past tense. Change nothing else.", told[False], told[True])
        add("tense", "Rewrite this text in the present tense. Change nothing else.", told[True], told[False])
        renamed = person(tense(story, True), she).replace("@", other)
        add("name", f"Replace the name {name} by {other} in this text.", told[True], renamed)
        add("spelling", "Correct the spelling mistakes in this text.", misspelled(told[True]), told[True])
        new = next(n for n, s, *_ in STORIES[i:] + STORIES if s != she)
        add(
            "person",
            f"Make {name} a {'man' if she else 'woman'} called {new}: change the name, and "
            f"{'she to he' if she else 'he to she'}.",
            told[False],
            person(tense(story, False), not she).replace("@", new),
        )
    for text in REGIONS:
        british, american = tense(text, False), tense(text, True)
        add("spelling", "Change the British spelling of this text to American spelling.", british, american)
        add("spelling", "Change the American spelling of this text to British spelling.", american, british)
    for language, old, new, text in CODE:
        noun = "table" if language == "SQL" else "variable"
        instruction = f"Rename the {noun} {old} to {new} in this {language} code. Print only the code."
        add("rename", instruction, text.replace("@", old), text.replace("@", new))
    for subject, text in LISTS:
        items = text.split(", ")
        numbered = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
        dashed = "\n".join(f"- {item}" for item in items)
        add("list", f"List: {subject}. Write it as a numbered list, one item per line.", text, numbered)
        add("list", f"List: {subject}. Write it in one line, with commas between the items.", dashed, text)
    for i, (text, dates) in enumerate(DATED):
        for old, new in (DATE_EDITS[i % 3], DATE_EDITS[(i + 1) % 3]):
            before, after = (text.format(*(FORMS[form](*date) for date in dates)) for form in (old, new))
            add("dates", f'Write every date in this text like "{new}" and leave the rest as it is.', before, after)
    return found


def as_text():
    rows = (json.dumps(edit, ensure_ascii=False) for edit in edits())
    return "[\n" + ",\n".join(rows) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(as_text(), encoding="utf-8")
    print(f"{len(edits())} edits, {FILE.stat().st_size} bytes: {FILE}")
