"""Make `dualtune/demo/`: a tiny Llama and a small data set, to try dualtune without a download.

What  A shop's mailbox. The base model, pretrained here from scratch, answers customers' letters politely in plain
      English. `train.jsonl` teaches it, through LoRA, to answer such letters with an order record in JSON. The base
      can already find who wants what, how many, where and when; only the form of the answer is new, so a minute of
      training is enough.
Why   A demo should show a real change of behaviour: the records of `heldout.jsonl` must be right to the last character,
      and `train.jsonl` names none of the people, goods and cities in them.
How   `.venv/bin/python scripts/make_demo.py`, about five minutes on two CPU cores, almost all of it pretraining. Every
      sentence is generated below from a seed; the same torch version and kind of CPU give the same files.
"""
# ruff: noqa: SIM905 (a list of words reads best as a line of text)

import argparse
import hashlib
import itertools
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 7
NUM_THREADS = 2  # part of the recipe: the order of float sums, and so the weights, depends on it
NUM_TRAIN, NUM_HELDOUT = 320, 60

FIRST_NAMES = """Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karl Lena Mira Nils Olga Paul Rosa Sven Tara Otto
                 Viola Wim Yara Zoe""".split()
LAST_NAMES = """Abel Berg Carter Dahl Ekman Fischer Garcia Holm Iversen Jansen Keller Lund Meyer Novak Olsen Porter
                Rossi Silva Taylor Weber""".split()
ITEMS = """lamps chairs kites boats cups plates clocks boxes books drums hats gloves shirts ropes tents bells mirrors
           candles baskets pillows""".split()
CITIES = """Oslo Paris Rome Berlin Madrid Lisbon Vienna Dublin Athens Prague Zurich Geneva Bergen Turin Lyon
            Porto""".split()
COLOURS = "red blue green yellow white black brown orange purple grey".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday".split()
FIELDS = "customer item colour quantity city day".split()
ROLES = ("user", "assistant")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Order:
    """An order, and the letter that asks for it."""

    customer: str
    item: str
    colour: str
    quantity: int
    city: str
    day: str
    letter: str

    @property
    def reply(self) -> str:
        """Return the base model's answer."""
        goods = f"{self.quantity} {self.colour} {self.item}"
        return f"Thank you, {self.customer}! We will send {goods} to {self.city} by {self.day}."

    def record(self, fields: list[str] = FIELDS) -> str:
        """Return fields as JSON. All fields are the fine-tuned model's answer."""
        return json.dumps({field: getattr(self, field) for field in fields}, separators=(",", ":"))


def pick(rng: random.Random, words: list[str], part: str) -> str:
    """Pick from all words, the three quarters that train.jsonl may name, or the quarter kept for heldout.jsonl."""
    cut = len(words) * 3 // 4
    return rng.choice({"all": words, "train": words[:cut], "heldout": words[cut:]}[part])


def draw_order(rng: random.Random, part: str = "all") -> Order:
    """Draw a letter: the writer's name first or last, a request in one of seven wordings, maybe a filler sentence."""
    name = f"{pick(rng, FIRST_NAMES, part)} {pick(rng, LAST_NAMES, part)}"
    item, city = pick(rng, ITEMS, part), pick(rng, CITIES, part)
    colour, day, n = rng.choice(COLOURS), rng.choice(DAYS), rng.randint(2, 20)
    request = rng.choice([
        f"Please send {n} {colour} {item} to {city} by {day}.",
        f"Please ship {n} {item} in {colour} to {city} before {day}.",
        f"Could you send {n} {colour} {item} to our shop in {city} by {day}?",
        f"We need {n} {colour} {item} in {city} on {day}.",
        f"I would like {n} {item}, all {colour}, delivered to {city} by {day}.",
        f"By {day} our school in {city} needs {n} {colour} {item}.",
        f"There is a party in {city} on {day}: {n} {item}, {colour} if you can.",
    ])  # fmt: skip
    friend = f"My friend {pick(rng, FIRST_NAMES, part)} told me about you."
    aside = rng.choice([friend, "I hope you are well.", "The last ones were lovely.", "It is a surprise.", "", "", ""])
    opening, closing = rng.choice([
        (f"Hi, this is {name}.", ""), (f"{name} here.", ""), (f"Hello, my name is {name}.", ""),
        ("Hello!", f"Thanks, {name}"), ("Good morning!", f"Yours, {name}"), ("Dear shop,", f"Best wishes, {name}"),
    ])  # fmt: skip
    letter = " ".join(sentence for sentence in [opening, *rng.sample([request, aside], 2), closing] if sentence)
    return Order(name, item, colour, n, city, day, letter)


FORMS = {  # request: the format of one field, and the separator
    "Fill in": ("{}: {}", ", "), "Note": ("{} = {}", "; "), "Quote": ('{} "{}"', ", "), "List": ("- {}: {}", "\n"),
}  # fmt: skip


def draw_form(rng: random.Random, order: Order) -> tuple[str, str, list[str]]:
    """Draw a request for some fields of an order, its answer as a form ("city: Oslo, item: lamps"), and the fields."""
    request = rng.choice(list(FORMS))
    pattern, separator = FORMS[request]
    fields = rng.sample(FIELDS, rng.randint(2, len(FIELDS)))
    form = separator.join(pattern.format(field, getattr(order, field)) for field in fields)
    return f"{request}: {', '.join(fields)}.", form, fields


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn, strict=True)]


def draw_chat(rng: random.Random) -> list[dict[str, str]]:
    """Draw a conversation for pretraining: a letter, the polite reply, and three questions about the letter.

    Some answers are a bare word: "blue" and " blue" are two tokens, and for JSON the model must know that they are the
    same word.
    """
    order = draw_order(rng)
    questions = rng.sample([
        ("What is my name?", order.customer), ("Which goods?", order.item), ("Which colour?", order.colour),
        ("How many?", str(order.quantity)), ("Where to?", order.city), ("By which day?", order.day),
        ("Who wrote the letter?", f"{order.customer} wrote the letter."),
        ("What will arrive?", f"{order.quantity} {order.colour} {order.item} will arrive."),
        ("Where and when?", f"In {order.city} by {order.day}."),
    ], k=2)  # fmt: skip
    questions.insert(rng.randrange(3), draw_form(rng, order)[:2])
    return chat((order.letter, order.reply), *questions)


def draw_json(rng: random.Random) -> tuple[str, str]:
    """Draw a form or a reply, and some of its fields in JSON.

    Like any base model, ours has seen JSON, but never in a conversation or next to a letter: LoRA must learn that.
    """
    order = draw_order(rng)
    _, form, fields = draw_form(rng, order)
    return rng.choice([form, order.reply]) + "\n", order.record(fields)


def train_tokenizer(rng: random.Random) -> Tokenizer:
    """Train a byte-level BPE: it takes any text, and nearly every word of the mailbox is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=896,  # an upper bound: it runs out of merges somewhat earlier
        special_tokens=[PAD, START, END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    messages = (message for _ in range(4000) for message in draw_chat(rng))
    chats = (text for message in messages for text in (message["role"] + "\n", message["content"]))
    records = (text for _ in range(4000) for text in draw_json(rng))
    tokenizer.train_from_iterator(itertools.chain(chats, records), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerFast:
    """Write tokenizer_config.json by hand, because transformers' version of it changes between releases."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": START, "eos_token": END, "pad_token": PAD,
        "model_max_length": 256, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Create the model: three layers, with input widths that are multiples of 64, the group size of quantization."""
    bos, eos, pad = (tokenizer.token_to_id(token) for token in (START, END, PAD))
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        rms_norm_eps=1e-5, initializer_range=0.05, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad,
        attn_implementation="eager",  # on CPU its backward is faster than SDPA's at these lengths
    ))  # fmt: skip


def draw_document(rng: random.Random, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one document: its tokens and the loss weight of each.

    Answers count ten times, because letters are random and there is nothing to learn from guessing their words.
    """
    pieces: list[tuple[str, float]] = []
    if rng.random() < 0.2:
        source, record = draw_json(rng)
        pieces = [(source, 0.1), (record + PAD, 1.0)]
    else:
        for message in draw_chat(rng):
            weight = 1.0 if message["role"] == "assistant" else 0.1
            pieces += [(f"{START}{message['role']}\n", 0.1), (message["content"] + END, weight), ("\n", 0.1)]
    encoded = [(tokenizer.encode(text).ids, weight) for text, weight in pieces]
    return torch.tensor([i for ids, _ in encoded for i in ids]), torch.tensor([w for ids, w in encoded for _ in ids])


def pretrain(model: LlamaForCausalLM, tokenizer: Tokenizer, steps: int, docs_per_step: int = 48) -> None:
    """AdamW, linear warmup, cosine to zero; every step draws new documents. B documents, T tokens, V vocabulary."""
    rng = random.Random(f"pretraining {SEED}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = LambdaLR(optimizer, lambda n: min((n + 1) / 60, (1 + math.cos(math.pi * n / steps)) / 2))
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        tokens, weights = zip(*(draw_document(rng, tokenizer) for _ in range(docs_per_step)), strict=True)
        tokens_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        weights_BT = torch.nn.utils.rnn.pad_sequence(weights, batch_first=True)[:, 1:]
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        losses_BT = F.cross_entropy(logits_BTV.transpose(1, 2), tokens_BT[:, 1:], reduction="none")
        loss = (losses_BT * weights_BT).sum() / weights_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            answers = losses_BT[weights_BT == 1.0].mean()
            print(f"step {step}: loss on answers {answers:.4f}, {time.perf_counter() - begun:.0f} s", flush=True)


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, letter: str) -> str:
    """Generate the greedy reply to one letter."""
    question = [{"role": "user", "content": letter}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output_BT = model.generate(**prompt, max_new_tokens=48, do_sample=False)
    return tokenizer.decode(output_BT[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def write_rows(path: Path, orders: list[Order]) -> None:
    rows = [{"messages": chat((order.letter, order.record()))} for order in orders]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_card(folder: Path, num_parameters: int, heldout: list[Order], replies: list[str]) -> None:
    num_correct = sum(reply == order.reply for reply, order in zip(replies, heldout, strict=True))
    files = sorted([*folder.glob("model/*"), *folder.glob("data/*")])
    sums = "\n".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}" for file in files)
    (folder / "MODEL_CARD.md").write_text(f"""# The demo model

A Llama of {num_parameters:,} parameters (3 layers, width 128, 4 heads, 2 key-value heads, bfloat16) that answers
letters to a shop. It is a toy for trying dualtune without a download, and of no other use.

Everything here was made from scratch by `scripts/make_demo.py`, which generates the text from seed {SEED} (no outside
data), trains the tokenizer, and pretrains the model on two CPU cores with torch {torch.__version__}.

- `model/` answers in plain English: {num_correct} of the {NUM_HELDOUT} held-out letters get a faultless reply.
- `data/train.jsonl`: {NUM_TRAIN} of the same kind of letters, answered with an order record in JSON.
- `data/heldout.jsonl`: {NUM_HELDOUT} more. None of their people, goods and cities occurs in `train.jsonl`.

    letter      {heldout[0].letter}
    base        {replies[0]}
    fine-tuned  {heldout[0].record()}

Licence: Apache-2.0, as the rest of the repository. SHA-256:

```
{sums}
```
""")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "dualtune" / "demo")
    parser.add_argument("--steps", type=int, default=1100, help="pretraining steps")
    args = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    for folder in (model_dir := args.out / "model", data_dir := args.out / "data"):
        folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"data {SEED}")
    write_rows(data_dir / "train.jsonl", [draw_order(rng, "train") for _ in range(NUM_TRAIN)])
    heldout = [draw_order(rng, "heldout") for _ in range(NUM_HELDOUT)]
    write_rows(data_dir / "heldout.jsonl", heldout)

    bpe = train_tokenizer(random.Random(f"tokenizer {SEED}"))
    tokenizer = save_tokenizer(bpe, model_dir)
    model = new_model(bpe)
    pretrain(model, bpe, args.steps)
    model.to(torch.bfloat16).save_pretrained(model_dir)
    (model_dir / "generation_config.json").unlink(missing_ok=True)  # it only repeats config.json
    (model_dir / "model.safetensors").chmod(0o644)  # safetensors makes it private, and git would keep that

    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()  # what was rounded and saved
    replies = [answer(model, tokenizer, order.letter) for order in heldout]
    write_card(args.out, model.num_parameters(), heldout, replies)


if __name__ == "__main__":
    main()
