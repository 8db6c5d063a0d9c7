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
from common.errors import Unreadable, UsageError

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


@pytest.mark.parametrize("replicas, accum, micro", [*itertools.product([1, 2, 3, 4, 8], [1, 2, 3], [1, 2, 5])])
def test_the_shares_of_the_replicas_are_the_step(replicas, accum, micro):
    batch = Batch(micro, accum, replicas)
    slots = np.arange(batch.global_batch)
    shares = [data.share_of(slots, batch, r) for r in range(replicas)]
    assert all(s.shape == (accum, micro) for s in shares)
    assert sorted(np.concatenate([s.ravel() for s in shares])) == slots.tolist()


@pytest.mark.parametrize("left", range(1, 24))
def test_what_is_left_of_an_epoch_is_spread_evenly_over_the_replicas(left):
    slots = np.array([*range(left), *[EMPTY] * (24 - left)])
    held = [int((data.share_of(slots, Batch(3, 2, 4), r) != EMPTY).sum()) for r in range(4)]
    assert sum(held) == left and max(held) - min(held) <= 1


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


def steps_of(count, batch, position, steps):
    """What all replicas read together, step by step, as a sorted list of (epoch, index)."""
    read = [[] for _ in range(steps - position.step)]
    for replica in range(batch.replicas):
        for k, micro in enumerate(data.MicroBatches(count, batch, 5, replica, position, steps)):
            assert len(micro) == batch.micro_batch
            read[k // batch.accum] += micro
    return [sorted(step) for step in read]


@pytest.mark.parametrize("replicas, accum, micro", [(1, 1, 4), (2, 1, 3), (2, 3, 2), (3, 2, 1), (4, 1, 1), (8, 2, 2)])
@pytest.mark.parametrize("count", [1, 5, 12, 33, 64])
def test_in_each_epoch_the_replicas_together_read_every_sample_once(count, replicas, accum, micro):
    batch = Batch(micro, accum, replicas)
    per_epoch = -(-count // batch.global_batch)
    steps = steps_of(count, batch, Position(), 3 * per_epoch)
    for epoch in range(3):
        group = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(at for step in group for at in step if at[1] != EMPTY) == [(epoch, i) for i in range(count)]
        assert all(len(step) == batch.global_batch for step in group)
        assert all(at[1] != EMPTY for step in group[:-1] for at in step)


@pytest.mark.parametrize("count", [5, 24, 50])
def test_a_run_resumed_anywhere_on_another_number_of_replicas_reads_the_same_steps(count):
    splits = [Batch(12, 1, 1), Batch(2, 3, 2), Batch(4, 1, 3), Batch(1, 3, 4), Batch(1, 1, 12)]
    straight = steps_of(count, splits[0], Position(), 11)
    position = Position()
    for stop in range(12):
        for batch in splits:
            assert steps_of(count, batch, position, 11) == straight[stop:]
        position = data.advance(position, count, 12)


def test_the_order_depends_on_the_seed_and_the_epoch_only():
    orders = {(s, e): data.epoch_order(50, s, e).tolist() for s in range(4) for e in range(4)}
    assert len({tuple(order) for order in orders.values()}) == 16
    assert all(data.epoch_order(50, s, e).tolist() == order for (s, e), order in orders.items())


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
    def __init__(self, names, caption="a picture", damaged=()):
        self.names, self.words, self.damaged = names, caption, damaged

    def __len__(self):
        return len(self.names)

    def name(self, i):
        return self.names[i]

    def caption(self, i):
        return self.words

    def image(self, i):
        if i in self.damaged:
            raise Unreadable("cut short")
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


def test_a_caption_is_cut_or_filled_to_77_tokens(frozen):
    for words in ("", "star", "a large red star " * 60):
        s = samples(frozen, Folder(["a.png"], words), caption_dropout=0.0, data="folder")
        tokens = s[0, 0]["tokens"]
        assert tokens.shape == (1, 77) and tokens.dtype == torch.int64
        begin, end = frozen.tokenizers[0].bos_token_id, frozen.tokenizers[0].eos_token_id
        assert tokens[0, 0] == begin and end in tokens[0]


def test_an_empty_slot_and_a_damaged_picture_weigh_nothing_and_stack_with_the_rest(frozen):
    s = samples(frozen, Folder(["a.png", "b.png"], damaged=[1]), data="folder")
    batch = data.collate([s[0, 0], s[0, 1], s[0, EMPTY]])
    assert batch["weight"].tolist() == [1.0, 0.0, 0.0]
    assert batch["name"] == ["a.png", "b.png", ""] and batch["problem"] == ["", "cut short", ""]
    assert batch["tokens"].shape == (3, 1, 77) and batch["noise"].shape == (3, 4, 8, 8)
    assert data.log_rows(1, 0, batch)["ids"] == ["a.png"]


def test_dropping_captions_changes_nothing_but_the_tokens(frozen):
    said, silent = samples(frozen, caption_dropout=0.0)[1, 2], samples(frozen, caption_dropout=1.0)[1, 2]
    assert not torch.equal(said["tokens"], silent["tokens"])
    for key in ("pixels", "t", "noise", "posterior_noise"):
        assert torch.equal(said[key], silent[key]), key


def test_a_noise_offset_adds_one_constant_per_channel(frozen):
    plain, offset = samples(frozen)[0, 0], samples(frozen, noise_offset=0.1)[0, 0]
    added = offset["noise"] - plain["noise"]
    assert (added.amax((1, 2)) - added.amin((1, 2))).max() < 1e-5
    assert len(set(added[:, 0, 0].tolist())) == 4
    assert torch.equal(plain["posterior_noise"], offset["posterior_noise"])


def test_pictures_are_flipped_as_often_as_asked(frozen):
    plain, half = samples(frozen), samples(frozen, flip=0.5)
    straight = [plain[0, i]["pixels"] for i in range(96)]
    flipped = sum(torch.equal(half[0, i]["pixels"], straight[i].flip(-1)) for i in range(96))
    kept = sum(torch.equal(half[0, i]["pixels"], straight[i]) for i in range(96))
    assert 30 <= flipped <= 66 and kept + flipped >= 96


def test_a_picture_keeps_its_noise_when_others_are_held_out(frozen):
    whole = samples(frozen)
    some = data.Samples(data.Shapes(96), frozen.tokenizers, whole.config, (4, 8, 8), 1000, np.array([7, 40]))
    assert len(some) == 2
    assert torch.equal(some[3, 1]["noise"], whole[3, 40]["noise"]) and some[3, 1]["t"] == whole[3, 40]["t"]


@pytest.mark.parametrize("count", [2, 3, 19, 20, 39, 40, 100, 1279, 1280, 3000])
def test_about_a_twentieth_is_held_out_and_nothing_is_lost(count):
    _, held, rest = data.held_out("folder", Folder([f"{i}.png" for i in range(count)]))
    assert len(held) == min(64, max(1, count // 20))
    assert sorted([*held, *rest]) == list(range(count))


@pytest.mark.parametrize("added", [1, 5, 40, 400])
def test_only_a_new_picture_takes_the_place_of_a_held_out_one(added):
    before = [f"{i}.png" for i in range(300)]
    after = [f"new-{i}.png" for i in range(added)] + before  # every old picture gets another index
    old, new = ({names[i] for i in data.held_out("folder", Folder(names))[1]} for names in (before, after))
    assert len(old - new) <= len(new - set(before))
    assert not (new & set(before)) - old or not old - new  # the old ones are those with the smallest hashes still


def test_a_single_picture_cannot_be_held_out():
    with pytest.raises(UsageError, match="at least 2 images in folder.*found 1"):
        data.held_out("folder", Folder(["a.png"]))


def test_no_training_run_draws_a_held_out_shape():
    held, indices, rest = data.held_out("shapes", data.Shapes(200))
    drawn = {data.Shapes(200).image(int(i)).tobytes() for i in rest}
    assert len(indices) == 64 and len(rest) == 200
    assert not drawn & {held.image(int(i)).tobytes() for i in indices}
    assert not {data.Shapes(data.SHAPES).name(i) for i in range(data.SHAPES)} & {held.name(int(i)) for i in indices}


@pytest.mark.parametrize("count", range(1, 65))
def test_a_held_out_loss_has_at_least_64_terms_and_each_picture_as_often(count):
    timesteps = data.held_out_samples(data.Shapes(64), np.arange(count), [], Config(), (4, 8, 8), 1000).timesteps
    assert len(timesteps) >= 64 and len(timesteps) % count == 0
    assert timesteps.min() >= 0 and timesteps.max() <= 999


def test_whether_a_picture_is_flipped_says_nothing_about_its_caption(frozen):
    plain, half = samples(frozen), samples(frozen, flip=0.5, caption_dropout=0.5)
    flipped = [not torch.equal(half[0, i]["pixels"], plain[0, i]["pixels"]) for i in range(96)]
    dropped = [half._caption(i, 0) == "" for i in range(96)]
    assert {*zip(flipped, dropped, strict=True)} == {*itertools.product([False, True], repeat=2)}
