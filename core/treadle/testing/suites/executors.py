"""What every executor must do with a plan, however the core cuts the work up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from treadle.contracts import Executor, KVFormat, ModelInfo, PoolSize, PoolSpec
from treadle.errors import ConfigError
from treadle.plan import BlockCopy, Outcome, StepPlan, Work
from treadle.plugin import missing_members
from treadle.sampling_params import SamplingParams

BLOCK = 16
NUM_BLOCKS = 24
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)
NUM_TOKENS = 6


@dataclass
class Running:
    """A request as the driver keeps it."""

    name: str
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    table: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def output(self) -> list[int]:
        """Tokens that were generated."""
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Known tokens still to compute."""
        return len(self.tokens) - self.num_computed


class Driver:
    """Feeds an executor plans made by hand; blocks are handed out in a scattered order."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        block_bytes = BLOCK * KVFormat().bytes_per_token(executor.model)
        self.size: PoolSize = executor.open_pool(PoolSpec(BLOCK, KVFormat(), NUM_BLOCKS, 1 << 30, int(16 * block_bytes)))
        self.free = list(range(NUM_BLOCKS))
        random.Random(NUM_BLOCKS).shuffle(self.free)  # noqa: S311  # only has to look scattered
        self._num_steps = 0

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Running:
        """A new sequence of which nothing is computed."""
        return Running(name, list(prompt), len(prompt), sampling or SamplingParams())

    def work(self, sequence: Running, num_tokens: int | None = None, drafted: Sequence[int] = ()) -> Work:
        """The next known tokens, all by default, then drafted ones."""
        start = sequence.num_computed
        end = len(sequence.tokens) if num_tokens is None else start + num_tokens
        while len(sequence.table) * BLOCK < end + len(drafted):
            sequence.table.append(self.free.pop())
        sampled = end == len(sequence.tokens)
        return Work(
            sequence.name,
            start,
            (*sequence.tokens[start:end], *drafted),
            tuple(sequence.table),
            sequence.sampling if sampled else None,
            len(drafted),
            len(sequence.output),
        )

    def run(self, *works: Work, swap_out: Sequence[BlockCopy] = (), swap_in: Sequence[BlockCopy] = ()) -> Outcome:
        """One pass."""
        self._num_steps += 1
        self.executor.launch(StepPlan(self._num_steps, works, tuple(swap_out), tuple(swap_in)))
        return self.executor.collect()

    def step(self, *parts: tuple[Running, int | None]) -> Outcome:
        """One pass over so many tokens of each sequence; what it brought is appended."""
        works = [self.work(sequence, num_tokens) for sequence, num_tokens in parts]
        outcome = self.run(*works)
        assert not outcome.errors, f"works failed: {dict(outcome.errors)}"
        for (sequence, _), work, tokens in zip(parts, works, outcome.tokens, strict=True):
            sequence.num_computed += len(work.tokens)
            sequence.tokens += tokens
        return outcome

    def generate(self, *sequences: Running, chunk: int | None = None, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
        """All together, until each has `num_tokens` tokens; at most `chunk` tokens of each a pass."""
        while going := [sequence for sequence in sequences if len(sequence.output) < num_tokens]:
            self.step(*((sequence, min(sequence.num_pending, chunk or sequence.num_pending)) for sequence in going))
        return [sequence.output for sequence in sequences]


class ExecutorSuite:
    """Results depend on a request's tokens, seed and positions alone: not on chunks, blocks, neighbours, drafts or copies.

    Greedy results are compared with each other, never with a known truth.
    """

    has_memory_limit: ClassVar[bool] = True
    """Whether a pool that no memory is given for is refused."""

    @pytest.fixture
    def make_executor(self) -> Callable[[], Executor]:
        """Makes the executor under test, always the same model, its pool not open yet. Override it."""
        pytest.fail(f"{type(self).__name__} must override the fixture `make_executor`")

    @pytest.fixture
    def driver(self, make_executor: Callable[[], Executor]) -> Driver:
        """An executor with an open pool."""
        return Driver(make_executor())

    def prompt(self, model: ModelInfo, length: int, seed: int = 0) -> list[int]:
        """Token ids, the same each time."""
        rng = random.Random(1000 * seed + length)  # noqa: S311  # has to be repeatable
        return [rng.randrange(model.vocab_size) for _ in range(length)]

    def truth(self, driver: Driver, prompt: Sequence[int], sampling: SamplingParams | None = None) -> list[int]:
        """What the executor generates for a prompt on its own."""
        return driver.generate(driver.add("truth", prompt, sampling))[0]

    # --- shape ----------------------------------------------------------------------------------------------------------------

    def test_it_is_an_executor(self, make_executor: Callable[[], Executor]) -> None:
        """It has the methods, and says what it is."""
        executor = make_executor()
        missing = missing_members(Executor, executor)
        assert not missing, f"{executor!r} is no Executor, for want of {missing}"
        facts = executor.describe()
        assert facts, "describe tells nothing"
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in facts.items()), f"{facts}"
        assert executor.clock.now() <= executor.clock.now()

    def test_the_pool_is_as_large_as_asked_for(self, driver: Driver) -> None:
        """Given a number of blocks."""
        assert driver.size.num_blocks == NUM_BLOCKS

    def test_a_pool_without_memory_is_refused(self, make_executor: Callable[[], Executor]) -> None:
        """With an error for the user."""
        if not self.has_memory_limit:
            pytest.skip("this executor counts no memory")
        with pytest.raises(ConfigError):
            make_executor().open_pool(PoolSpec(BLOCK, KVFormat(), None, 1))

    def test_an_outcome_has_an_entry_for_each_work(self, driver: Driver) -> None:
        """Empty for a chunk that ends early, else one token of the vocabulary."""
        model = driver.executor.model
        early, late = (driver.add(str(n), self.prompt(model, n)) for n in (20, 21))
        outcome = driver.run(driver.work(early, 7), driver.work(late))
        assert isinstance(outcome, Outcome), f"{outcome!r} is no Outcome"
        assert [len(tokens) for tokens in outcome.tokens] == [0, 1], f"{outcome.tokens}"
        assert all(type(t) is int and 0 <= t < model.vocab_size for tokens in outcome.tokens for t in tokens), f"{outcome}"

    def test_a_plan_without_works_brings_nothing(self, driver: Driver) -> None:
        """It may have copies only."""
        assert driver.run().tokens == ()

    # --- independence -----------------------------------------------------------------------------------------------------------

    def test_chunks_make_no_difference(self, driver: Driver) -> None:
        """Of one token, of five, of a block."""
        for length in LENGTHS:
            prompt = self.prompt(driver.executor.model, length)
            whole = self.truth(driver, prompt)
            for chunk in (1, 5, BLOCK):
                driver.free = list(range(NUM_BLOCKS))
                chunked = driver.generate(driver.add("chunked", prompt), chunk=chunk)[0]
                assert chunked == whole, f"{length} tokens in chunks of {chunk}: {chunked} is not {whole}"
            driver.free = list(range(NUM_BLOCKS))

    def test_blocks_make_no_difference(self, driver: Driver) -> None:
        """In order, scattered, and with a table that is longer than needed."""
        prompt = self.prompt(driver.executor.model, 2 * BLOCK + 3)
        tables = ([0, 1, 2, 3], [9, 2, 17, 5], [3, 2, 1, 0, 20, 21])
        outputs = []
        for table in tables:
            sequence = driver.add("some", prompt)
            sequence.table = list(table)
            outputs += driver.generate(sequence)
        assert outputs[1:] == outputs[:1] * 2, f"{outputs}"

    def test_neighbours_make_no_difference(self, driver: Driver) -> None:
        """Prefill and decode of others in the same pass."""
        prompts = [self.prompt(driver.executor.model, length) for length in LENGTHS]
        alone = []
        for prompt in prompts:
            driver.free = list(range(NUM_BLOCKS))
            alone.append(self.truth(driver, prompt))
        driver.free = list(range(NUM_BLOCKS))
        sequences = [driver.add(str(n), prompt) for n, prompt in enumerate(prompts)]
        for number in range(len(sequences)):
            driver.step(*((sequence, None) for sequence in sequences[: number + 1]))
        driver.generate(*sequences)
        assert [sequence.output[:NUM_TOKENS] for sequence in sequences] == alone

    def test_a_shared_prefix_makes_no_difference(self, driver: Driver) -> None:
        """Computed before, or by another work of the same pass, whichever comes first in the plan."""
        prompt = self.prompt(driver.executor.model, 2 * BLOCK + 5)
        expected = self.truth(driver, prompt)
        for same_pass in (False, True):
            driver.free = list(range(NUM_BLOCKS))
            owner, reader = driver.add("owner", prompt), driver.add("reader", prompt)
            work = driver.work(owner)
            reader.table, reader.num_computed = owner.table[:2], 2 * BLOCK
            if same_pass:
                outcome = driver.run(driver.work(reader), work)
                assert outcome.tokens == ((expected[0],), (expected[0],)), f"{outcome.tokens} instead of {expected[0]} twice"
            else:
                driver.run(work)
                assert driver.generate(reader)[0] == expected

    def test_a_seed_decides_alone(self, driver: Driver) -> None:
        """The same seed gives the same tokens, with and without neighbours and chunks."""
        sampling = SamplingParams(temperature=1.0, seed=7)
        prompt = self.prompt(driver.executor.model, BLOCK + 3)
        alone = self.truth(driver, prompt, sampling)
        again, other = (
            driver.add("again", prompt, sampling),
            driver.add("other", prompt[:5], SamplingParams(temperature=2.0, seed=8)),
        )
        driver.step((other, None))
        together = driver.generate(again, other, chunk=4)[0]
        assert together[:NUM_TOKENS] == alone, f"{together} is not {alone}"

    def test_drafts_change_how_fast_tokens_come_never_which(self, driver: Driver) -> None:
        """Right ones, wrong ones, and right ones with a wrong end."""
        prompt = self.prompt(driver.executor.model, BLOCK - 2)
        expected = self.truth(driver, prompt)
        wrong = [(token + 1) % driver.executor.model.vocab_size for token in expected]
        for drafted in (expected[1:4], wrong[1:4], [*expected[1:3], wrong[3]]):
            driver.free = list(range(NUM_BLOCKS))
            sequence = driver.add("drafted", prompt)
            driver.step((sequence, None))
            brought = driver.run(driver.work(sequence, drafted=drafted)).tokens[0]
            assert 1 <= len(brought) <= 1 + len(drafted), f"{len(drafted)} drafted tokens brought {brought}"
            assert list(brought) == expected[1 : 1 + len(brought)], f"drafts {drafted} led to {brought}, not {expected[1:]}"

    # --- copies -----------------------------------------------------------------------------------------------------------------

    def test_kv_comes_back_from_swap_space(self, driver: Driver) -> None:
        """To other blocks, though its old ones are written over in the very pass that copies it out."""
        if driver.size.num_swap_blocks < 2:
            pytest.skip("no swap space was made")
        prompt = self.prompt(driver.executor.model, 2 * BLOCK - 1)
        expected = self.truth(driver, prompt)
        driver.free = list(range(NUM_BLOCKS))
        victim = driver.add("victim", prompt)
        driver.step((victim, None))
        intruder = driver.add("intruder", self.prompt(driver.executor.model, 2 * BLOCK, seed=1))
        intruder.table = list(victim.table)
        out = [BlockCopy(block_id, place) for place, block_id in enumerate(victim.table)]
        driver.run(driver.work(intruder), swap_out=out)
        victim.table = [driver.free.pop(), driver.free.pop()]
        back = [BlockCopy(place, block_id) for place, block_id in enumerate(victim.table)]
        outcome = driver.run(driver.work(victim), swap_in=back)
        assert list(outcome.tokens[0]) == expected[1:2], f"{outcome.tokens[0]} is not {expected[1:2]}"

    def test_a_copy_leaves_its_source_as_it_was(self, driver: Driver) -> None:
        """A block that is swapped out may be cached for others."""
        if driver.size.num_swap_blocks < 1:
            pytest.skip("no swap space was made")
        prompt = self.prompt(driver.executor.model, BLOCK + 4)
        expected = self.truth(driver, prompt)
        driver.free = list(range(NUM_BLOCKS))
        owner, reader = driver.add("owner", prompt), driver.add("reader", prompt)
        driver.step((owner, None))
        driver.run(swap_out=[BlockCopy(owner.table[0], 0)])
        reader.table, reader.num_computed = owner.table[:1], BLOCK
        assert driver.generate(reader)[0] == expected

    # --- errors -----------------------------------------------------------------------------------------------------------------

    def test_after_an_impossible_work_others_go_on(self, driver: Driver) -> None:
        """It may raise, or tell which work failed; the next plan is computed as if nothing had been."""
        prompt = self.prompt(driver.executor.model, BLOCK + 1)
        expected = self.truth(driver, prompt)
        driver.free = list(range(NUM_BLOCKS))
        good, bad = driver.add("good", prompt), driver.add("bad", prompt)
        bad.table = [10**6, 10**6 + 1]
        try:
            outcome = driver.run(driver.work(good), driver.work(bad))
        except Exception:  # noqa: S110  # an executor may raise anything: then the core relies on nothing of this pass
            pass
        else:
            assert 0 not in outcome.errors, f"the good work failed too: {dict(outcome.errors)}"
            assert list(outcome.tokens[0]) == expected[:1]
        assert driver.generate(driver.add("next", prompt))[0] == expected

    def test_it_can_be_closed(self, driver: Driver) -> None:
        """After work."""
        driver.generate(driver.add("some", self.prompt(driver.executor.model, 3)))
        driver.executor.close()
