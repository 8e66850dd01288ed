"""Make the data of `dualtune train --demo smollm2`: questions on a small database, answered with SQL.

    python scripts/make_demo_sql.py

Writes train.jsonl and heldout.jsonl beside `dualtune/demo/smollm2/world.sql`, from seed 7. Each kind of question has
seven wordings; the last one of each kind is asked only in the held-out rows, and no held-out question occurs in the
training rows. Every query is executed, and one without an answer is not written.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "dualtune" / "demo" / "smollm2"
SEED = 7
SIZES = {"train": 480, "heldout": 48}
SYSTEM = (
    "Answer with one SQLite query. Tables: countries(name, capital, continent, population, area), "
    "rivers(name, length, country). population is in millions."
)

Question = tuple[list[str], str]


class World:
    """The database, and values of it to ask for."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.database = sqlite3.connect(":memory:")
        self.database.executescript((FOLDER / "world.sql").read_text(encoding="utf-8"))

    def value(self, query: str) -> str:
        rows = [row[0] for row in self.database.execute(query)]
        return str(self.rng.choice(rows))

    def country(self) -> str:
        return self.value("SELECT name FROM countries")

    def continent(self) -> str:
        return self.value("SELECT DISTINCT continent FROM countries")

    def river(self) -> str:
        return self.value("SELECT name FROM rivers")

    def river_country(self) -> str:
        return self.value("SELECT DISTINCT country FROM rivers")


def capital_of(world: World) -> Question:
    country = world.country()
    return [
        f"What is the capital of {country}?", f"Which city is the capital of {country}?",
        f"Name the capital of {country}.", f"Tell me {country}'s capital.", f"What's the capital city of {country}?",
        f"Give the capital of {country}.", f"Do you know the capital of {country}?",
    ], f"SELECT capital FROM countries WHERE name = '{country}'"  # fmt: skip


def country_of_capital(world: World) -> Question:
    capital = world.value("SELECT capital FROM countries")
    return [
        f"{capital} is the capital of which country?", f"Which country has the capital {capital}?",
        f"What country is {capital} the capital of?", f"Name the country whose capital is {capital}.",
        f"{capital} is which country's capital?", f"Of which country is {capital} the capital?",
        f"Whose capital is {capital}?",
    ], f"SELECT name FROM countries WHERE capital = '{capital}'"  # fmt: skip


def continent_of(world: World) -> Question:
    country = world.country()
    return [
        f"Which continent is {country} on?", f"On what continent does {country} lie?",
        f"Where in the world is {country}? Give the continent.", f"Tell me the continent of {country}.",
        f"What continent is {country} part of?", f"{country} is on which continent?",
        f"To which continent does {country} belong?",
    ], f"SELECT continent FROM countries WHERE name = '{country}'"  # fmt: skip


def people_of(world: World) -> Question:
    country = world.country()
    return [
        f"How many people live in {country}?", f"What is the population of {country}?",
        f"How many millions of people does {country} have?", f"How many inhabitants has {country}?",
        f"Tell me the population of {country}.", f"Give the number of people in {country}.",
        f"How large is the population of {country}?",
    ], f"SELECT population FROM countries WHERE name = '{country}'"  # fmt: skip


def area_of(world: World) -> Question:
    country = world.country()
    return [
        f"How large is {country}?", f"What is the area of {country}?", f"What area does {country} cover?",
        f"How big is {country}?", f"Tell me the area of {country}.", f"Give the size of {country}.",
        f"What is the size of {country} in thousand square kilometres?",
    ], f"SELECT area FROM countries WHERE name = '{country}'"  # fmt: skip


def count_on(world: World) -> Question:
    continent = world.continent()
    return [
        f"How many countries are there in {continent}?", f"Count the countries of {continent}.",
        f"What is the number of countries in {continent}?", f"Give the number of countries on {continent}.",
        f"{continent} has how many countries?", f"How many countries does {continent} have?",
        f"How many of the countries lie in {continent}?",
    ], f"SELECT COUNT(*) FROM countries WHERE continent = '{continent}'"  # fmt: skip


def listed_on(world: World) -> Question:
    continent = world.continent()
    return [
        f"Which countries are in {continent}?", f"List all countries of {continent}.",
        f"Show me the countries in {continent}.", f"Name every country in {continent}.",
        f"Which countries belong to {continent}?", f"What are the countries of {continent}?",
        f"What countries does {continent} have?",
    ], f"SELECT name FROM countries WHERE continent = '{continent}'"  # fmt: skip


def extreme_on(world: World) -> Question:
    continent = world.continent()
    (word, plain), (column, order) = world.rng.choice([
        (("largest", "biggest"), ("area", "DESC")), (("smallest", "tiniest"), ("area", "ASC")),
        (("most populous", "most crowded"), ("population", "DESC")),
        (("least populous", "emptiest"), ("population", "ASC")),
    ])  # fmt: skip
    return [
        f"What is the {word} country in {continent}?", f"Which country of {continent} is the {word}?",
        f"Name the {plain} country in {continent}.", f"Which is the {plain} country of {continent}?",
        f"Tell me the {word} country in {continent}.", f"{continent}'s {plain} country is which one?",
        f"In {continent}, which country is the {word} one?",
    ], f"SELECT name FROM countries WHERE continent = '{continent}' ORDER BY {column} {order} LIMIT 1"  # fmt: skip


def more_than(world: World) -> Question:
    number = world.rng.choice([5, 10, 20, 25, 30, 40, 50, 60, 75, 80, 90, 100, 120, 150, 200, 250, 500])
    return [
        f"Which countries have more than {number} million people?",
        f"List the countries with over {number} million inhabitants.",
        f"Where do more than {number} million people live?", f"Name the countries with over {number} million people.",
        f"What countries have a population above {number} million?",
        f"Show countries of more than {number} million people.", f"What countries exceed {number} million people?",
    ], f"SELECT name FROM countries WHERE population > {number}"  # fmt: skip


def more_than_on(world: World) -> Question:
    number, continent = world.rng.choice([1, 2, 5, 10, 20, 30, 40, 50, 60, 80, 100, 200]), world.continent()
    return [
        f"Which countries in {continent} have more than {number} million people?",
        f"List the countries of {continent} with over {number} million inhabitants.",
        f"In {continent}, where do more than {number} million people live?",
        f"Name the countries of {continent} with over {number} million people.",
        f"What countries in {continent} have a population above {number} million?",
        f"Show countries in {continent} of more than {number} million people.",
        f"What countries of {continent} exceed {number} million people?",
    ], f"SELECT name FROM countries WHERE continent = '{continent}' AND population > {number}"  # fmt: skip


def total_on(world: World) -> Question:
    continent = world.continent()
    word, column = world.rng.choice([("population", "population"), ("area", "area")])
    return [
        f"What is the total {word} of {continent}?", f"Add up the {word} of all countries in {continent}.",
        f"What {word} do the countries of {continent} have together?",
        f"Sum the {word} of the countries in {continent}.", f"Give the total {word} of the countries of {continent}.",
        f"In all, what is the {word} of {continent}?", f"Taken together, what is the {word} of {continent}?",
    ], f"SELECT SUM({column}) FROM countries WHERE continent = '{continent}'"  # fmt: skip


def length_of(world: World) -> Question:
    river = world.river()
    return [
        f"How long is the {river}?", f"What is the length of the {river}?",
        f"How many kilometres does the {river} flow?", f"Give the length of the {river}.",
        f"How many kilometres long is the {river}?", f"What length does the river {river} have?",
        f"Tell me the length of the river {river}.",
    ], f"SELECT length FROM rivers WHERE name = '{river}'"  # fmt: skip


def rivers_of(world: World) -> Question:
    country = world.river_country()
    return [
        f"Which rivers flow in {country}?", f"List the rivers of {country}.", f"Name all rivers in {country}.",
        f"Show me the rivers in {country}.", f"Which rivers belong to {country}?",
        f"What are the rivers of {country}?", f"What rivers does {country} have?",
    ], f"SELECT name FROM rivers WHERE country = '{country}'"  # fmt: skip


def longer_than(world: World) -> Question:
    length = world.rng.choice([400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1500, 1600, 2000, 2500, 3000, 5000])
    return [
        f"Which rivers are longer than {length} km?", f"List the rivers with a length over {length} km.",
        f"What rivers flow for more than {length} kilometres?", f"Name the rivers of more than {length} km.",
        f"Show rivers longer than {length} km.", f"Which rivers have over {length} kilometres?",
        f"Name every river above {length} km.",
    ], f"SELECT name FROM rivers WHERE length > {length}"  # fmt: skip


def longest_on(world: World) -> Question:
    continent = world.continent()
    word, order = world.rng.choice([("longest", "DESC"), ("shortest", "ASC")])
    return [
        f"What is the {word} river in {continent}?", f"Which river of {continent} is the {word}?",
        f"Name the {word} river of {continent}.", f"Tell me the {word} river in {continent}.",
        f"Which is the {word} river of {continent}?", f"{continent}'s {word} river is which one?",
        f"In {continent}, which river is the {word} one?",
    ], (
        "SELECT rivers.name FROM rivers JOIN countries ON rivers.country = countries.name "
        f"WHERE continent = '{continent}' ORDER BY length {order} LIMIT 1"
    )  # fmt: skip


def capital_by_river(world: World) -> Question:
    river = world.river()
    return [
        f"What is the capital of the country with the {river}?",
        f"The {river} flows in a country with which capital?",
        f"Name the capital of the country of the {river}.", f"Give the capital of the country of the river {river}.",
        f"What is the capital where the {river} flows?", f"Tell me the capital of the country with the {river}.",
        f"Which capital belongs to the country where the {river} is?",
    ], (
        "SELECT capital FROM countries JOIN rivers ON rivers.country = countries.name "
        f"WHERE rivers.name = '{river}'"
    )  # fmt: skip


KINDS: list[Callable[[World], Question]] = [
    capital_of, country_of_capital, continent_of, people_of, area_of, count_on, listed_on, extreme_on, more_than,
    more_than_on, total_on, length_of, rivers_of, longer_than, longest_on, capital_by_river,
]  # fmt: skip


def rows(world: World) -> dict[str, list[dict[str, object]]]:
    """Return the rows of each file. A kind is asked equally often, as far as it has enough questions."""
    split: dict[str, list[dict[str, object]]] = {"heldout": [], "train": []}
    for name, split_rows in split.items():
        asked, turn = set[str](), 0
        while len(split_rows) < SIZES[name]:
            wordings, query = KINDS[turn % len(KINDS)](world)
            question = wordings[-1] if name == "heldout" else world.rng.choice(wordings[:-1])
            turn += 1
            if question in asked or not world.database.execute(query).fetchall():
                continue
            asked.add(question)
            pairs = (("system", SYSTEM), ("user", question), ("assistant", query))
            split_rows.append({"messages": [{"role": role, "content": text} for role, text in pairs]})
        world.rng.shuffle(split_rows)
    return split


def main() -> None:
    for name, split_rows in rows(World(random.Random(SEED))).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in split_rows)
        (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
