"""Order, shares and noise: plain integers, over many sizes."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from common import data, models
from common.config import Batch, Config, parse, with_recipe
from common.data import EMPTY, Position

SIZES = [(1, 1), (3, 8), (10, 4), (16, 4), (17, 5), (100, 24), (101, 7)]  # samples, global batch


def walk(count, batch, steps, position=None):
    position = position or Position()
    for _ in range(steps):
        yield position, data.slots_of(position, count, batch, seed=3)
        position = data.advance(position, count, batch)


@pytest.mark.parametrize("count, batch", SIZES)
def test_an_epoch_has_every_sample_once_and_pads_only_its_last_step(count, batch):
    steps = -(-count // batch)
    for epoch, group in itertools.groupby(walk(count, batch, 3 * steps), key=lambda at: at[0].epoch):
        slots = [s for _, s in group]
        assert len(slots) == steps
        assert sorted(np.concatenate(slots)[np.concatenate(slots) != EMPTY]) == list(range(count)), epoch
        assert all((s != EMPTY).all() for s in slots[:-1])


@pytest.mark.parametrize("count, batch", [(s, b) for s, b in SIZES if s > 1])
def test_epochs_differ_in_order(count, batch):
    assert any((data.epoch_order(count, 0, e) != data.epoch_order(count, 0, 0)).any() for e in range(1, 9))


@pytest.mark.parametrize("replicas, accum, micro", itertools.product([1, 2, 3, 4, 8], [1, 2, 3], [1, 2, 5]))
def test_the_shares_of_the_replicas_are_the_step(replicas, accum, micro):
    batch = Batch(micro, accum, replicas)
    slots = np.arange(batch.global_batch)
    shares = [data.share_of(slots, batch, r) for r in range(replicas)]
    assert all(s.shape == (accum, micro) for s in shares)
    assert sorted(np.concatenate([s.ravel() for s in shares])) == slots.tolist()


@pytest.mark.parametrize("count, batch", SIZES)
def test_a_resumed_stream_goes_on_where_it_stopped(count, batch):
    straight = list(walk(count, batch, 12))
    for stop in range(12):
        resumed = list(walk(count, batch, 12 - stop, straight[stop][0]))
        assert all(a[0] == b[0] and (a[1] == b[1]).all() for a, b in zip(straight[stop:], resumed, strict=True))


def test_a_resumed_loader_lists_only_what_is_left():
    plan = Batch(2, 2, 2)
    whole = list(data.MicroBatches(10, plan, 0, 1, Position(), 6))
    assert len(whole) == 12
    position = data.advance(data.advance(Position(), 10, 8), 10, 8)
    assert list(data.MicroBatches(10, plan, 0, 1, position, 6)) == whole[4:]


def test_a_resume_on_other_data_or_another_batch_says_so_and_begins_a_whole_epoch():
    state = {"position": {"step": 2, "epoch": 0, "offset": 8}, "count": 10, "names": "a", "global_batch": 4}
    assert data.position_after(state, 10, "a", 4) == (Position(2, 0, 8), [])
    position, notes = data.position_after(state, 10, "a", 6)
    assert position == Position(2, 0, 8) and notes == ["resuming with a global batch of 6 (was 4)"]
    for count, names in ((7, "b"), (10, "b")):
        position, notes = data.position_after(state, count, names, 4)
        assert position == Position(2, 1, 0) and "were 10" in notes[0]
    at_the_turn = state | {"position": {"step": 3, "epoch": 1, "offset": 0}}
    assert data.position_after(at_the_turn, 7, "b", 4)[0] == Position(3, 1, 0)


# ── Samples ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def frozen():
    return models.build_frozen(models.spec_of(Config()), 0)


def samples(frozen, source=None, **changes):
    config = dataclasses.replace(with_recipe(parse("ddp", [])), resolution=64, **changes)
    return data.Samples(source or data.Shapes(96), frozen.tokenizers, config, (4, 8, 8), 1000)


def test_a_sample_is_a_function_of_seed_epoch_and_index(frozen):
    one, other = samples(frozen), samples(frozen)
    for key in ("pixels", "t", "noise", "tokens", "posterior_noise"):
        assert torch.equal(one[2, 5][key], other[2, 5][key])
    assert not torch.equal(one[2, 5]["noise"], one[3, 5]["noise"])
    assert not torch.equal(one[2, 5]["noise"], one[2, 6]["noise"])
    assert not torch.equal(one[2, 5]["noise"], samples(frozen, seed=1)[2, 5]["noise"])


def test_a_flag_about_pictures_leaves_the_noise_alone(frozen):
    plain, flipped = samples(frozen), samples(frozen, flip=1.0, crop="random")
    assert torch.equal(plain[0, 1]["noise"], flipped[0, 1]["noise"]) and plain[0, 1]["t"] == flipped[0, 1]["t"]
    assert torch.equal(plain[0, 1]["pixels"].flip(-1), flipped[0, 1]["pixels"])


def test_captions_are_dropped_as_often_as_asked(frozen):
    empty = samples(frozen)._tokens("")
    for p, low, high in ((0.0, 0, 0), (0.3, 200, 280), (1.0, 800, 800)):
        s = samples(frozen, caption_dropout=p)
        dropped = sum(s._caption(i % 96, i // 96) == "" for i in range(800))
        assert low <= dropped <= high
    assert torch.equal(samples(frozen, caption_dropout=1.0)[0, 0]["tokens"], empty)


def test_tokens_are_77_long_and_every_word_of_the_captions_is_one(frozen):
    tokens = samples(frozen, caption_dropout=0.0)[0, 0]["tokens"]
    assert tokens.shape == (1, 77)
    assert len(set(tokens[0].tolist())) == 2 + 4  # begin, end, "a large red star"


class Folder:
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def name(self, i):
        return self.names[i]

    def caption(self, i):
        return "a picture"

    def image(self, i):
        return Image.new("RGB", (96, 64), (200, 10, 10))


def test_held_out_pictures_are_not_trained_and_stay_when_others_come():
    before, after = ([f"{i}.png" for i in range(n)] for n in (200, 220))
    _, held, rest = data.held_out("folder", Folder(before))
    _, more, _ = data.held_out("folder", Folder(after))
    assert len(held) == 10 and not set(held) & set(rest) and len(held) + len(rest) == 200
    assert len({before[i] for i in held} - {after[i] for i in more}) <= 1  # a new picture may take a place


def test_held_out_timesteps_cover_the_schedule_and_ignore_the_seed(frozen):
    made = [
        data.held_out_samples(
            data.Shapes(64), np.arange(64), frozen.tokenizers, samples(frozen, seed=s).config, (4, 8, 8), 1000
        )
        for s in (0, 7)
    ]
    t = np.sort(made[0].timesteps)
    assert len(t) == 64 and (np.diff(t) > 0).all() and t[0] < 20 and t[-1] > 980
    assert torch.equal(made[0][0, 3]["noise"], made[1][0, 3]["noise"])
