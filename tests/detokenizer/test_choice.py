"""A choice's events cover its log and its text without gap or overlap, whatever arrives twice, late or not at all."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.choice import Choice, LogGap
from services.detokenizer.logprobs import LogprobTexts
from services.detokenizer.stop_strings import StopScanner, stop_strings
from shared.ids import RequestId
from shared.messages import ChoiceText, ChoiceTokens, FinishReason, TokenLogprobs, int32s
from tests.detokenizer.vocabularies import Case

REQUEST = RequestId("req-1")
CaseOf = Callable[[str], Case]


def choice_of(case: Case, *, stop: tuple[str, ...] = (), skip: bool = True) -> Choice:
    """A choice with index 2."""
    decoder = case.decoding.new_decoder(skip_special_tokens=skip)
    scanner = StopScanner(stop_strings(stop)) if stop else None
    return Choice(REQUEST, 2, decoder, scanner, LogprobTexts(case.decoding))


def entry(
    offset: int,
    token_ids: Sequence[int],
    reason: FinishReason | None = None,
    logprobs: tuple[TokenLogprobs | None, ...] = (),
) -> ChoiceTokens:
    """Entries of the choice's log."""
    return ChoiceTokens(REQUEST, 2, offset, int32s(token_ids), reason, logprobs)


def ids(case: Case, *tokens: str) -> list[int]:
    """The ids of these tokens."""
    return [case.id_of(token) for token in tokens]


@pytest.fixture
def case(case_of: CaseOf) -> Case:
    """A byte-level tokenizer."""
    return case_of("byte level")


def check_cover(events: Sequence[ChoiceText]) -> tuple[list[int], str]:
    """All token ids and all text; asserts that offsets leave nothing out and count no part twice."""
    token_ids: list[int] = []
    text = ""
    for event in events:
        assert (event.token_offset, event.char_offset) == (len(token_ids), len(text))
        token_ids += event.token_ids
        text += event.text
    return token_ids, text


def test_text_leaves_with_its_tokens(case: Case) -> None:
    choice = choice_of(case)
    the, cat = ids(case, "the", "Ġcat")
    assert choice.take(entry(0, [the])) == ChoiceText(REQUEST, 2, 0, int32s([the]), 0, "the")
    assert choice.take(entry(1, [cat])) == ChoiceText(REQUEST, 2, 1, int32s([cat]), 3, " cat")
    assert choice.num_tokens == 2


def test_offsets_count_code_points(case: Case) -> None:
    choice = choice_of(case)
    token_ids = case.tokenizer.encode("👍🏽a").ids
    event = choice.take(entry(0, token_ids))
    assert event is not None
    assert event.text == "👍🏽a"
    following = choice.take(entry(len(token_ids), ids(case, "a")))
    assert following is not None
    assert following.char_offset == 3


def test_tokens_without_text_wait_for_the_next_text(case: Case) -> None:
    choice = choice_of(case)
    first, second, third, end = ids(case, "â", "Ĥ", "¬", "<|im_end|>")
    assert choice.take(entry(0, [first])) is None
    assert choice.take(entry(1, [second])) is None
    assert choice.take(entry(2, [third])) == ChoiceText(REQUEST, 2, 0, int32s([first, second, third]), 0, "€")
    assert choice.take(entry(3, [end])) is None
    finish = choice.take(entry(4, [], FinishReason.STOP))
    assert finish == ChoiceText(REQUEST, 2, 3, int32s([end]), 1, "", FinishReason.STOP)


def test_the_end_gives_out_an_unfinished_character(case: Case) -> None:
    choice = choice_of(case)
    token_ids = ids(case, "a", "â", "Ĥ")
    event = choice.take(entry(0, token_ids, FinishReason.LENGTH))
    assert event == ChoiceText(REQUEST, 2, 0, int32s(token_ids), 0, "a�", FinishReason.LENGTH)
    assert choice.is_finished


def test_what_is_known_already_is_passed_over(case: Case) -> None:
    choice = choice_of(case)
    the, cat, dot = ids(case, "the", "Ġcat", ",")
    choice.take(entry(0, [the, cat]))
    assert choice.take(entry(0, [the])) is None
    assert choice.take(entry(0, [the, cat])) is None
    assert choice.take(entry(1, [cat, dot])) == ChoiceText(REQUEST, 2, 2, int32s([dot]), 7, ",")


def test_a_gap_is_told_and_changes_nothing(case: Case) -> None:
    choice = choice_of(case)
    the, cat = ids(case, "the", "Ġcat")
    choice.take(entry(0, [the]))
    with pytest.raises(LogGap):
        choice.take(entry(3, [cat]))
    assert choice.take(entry(1, [cat])) == ChoiceText(REQUEST, 2, 1, int32s([cat]), 3, " cat")


def test_nothing_follows_the_end(case: Case) -> None:
    choice = choice_of(case)
    assert choice.take(entry(0, [], FinishReason.STOP)) is not None
    assert choice.take(entry(0, ids(case, "a"))) is None
    assert choice.take(entry(0, [], FinishReason.LENGTH)) is None
    assert choice.close() is None


def test_a_stop_string_ends_the_text_and_counts_its_tokens(case: Case) -> None:
    choice = choice_of(case, stop=("t,",))
    the, cat, comma, dog = ids(case, "the", "Ġcat", ",", "Ġdog")
    assert choice.take(entry(0, [the])) is not None
    event = choice.take(entry(1, [cat]))
    assert event is not None
    assert event.text == " ca"
    assert choice.take(entry(2, [comma, dog])) is None
    assert (choice.is_stopped, choice.num_tokens, choice.is_finished) == (True, 3, False)
    assert choice.take(entry(4, [dog])) is None
    finish = choice.take(entry(3, [], FinishReason.LENGTH))
    assert finish == ChoiceText(REQUEST, 2, 2, int32s([comma]), 6, "", FinishReason.STOP)


def test_a_stop_string_in_the_last_entry_is_the_reason_whatever_the_scheduler_says(case: Case) -> None:
    choice = choice_of(case, stop=("ca",))
    the, cat, dog = ids(case, "the", "Ġcat", "Ġdog")
    event = choice.take(entry(0, [the, cat, dog], FinishReason.LENGTH))
    assert event == ChoiceText(REQUEST, 2, 0, int32s([the, cat]), 0, "the ", FinishReason.STOP)
    assert choice.num_tokens == 2


def test_the_beginning_of_a_stop_string_is_sent_at_the_end(case: Case) -> None:
    choice = choice_of(case, stop=("cats",))
    the, cat = ids(case, "the", "Ġcat")
    event = choice.take(entry(0, [the, cat]))
    assert event == ChoiceText(REQUEST, 2, 0, int32s([the, cat]), 0, "the ")
    finish = choice.take(entry(2, [], FinishReason.LENGTH))
    assert finish == ChoiceText(REQUEST, 2, 2, int32s(), 4, "cat", FinishReason.LENGTH)


def test_a_stop_string_may_be_completed_by_what_the_end_gives_out(case: Case) -> None:
    choice = choice_of(case, stop=("a�",))
    event = choice.take(entry(0, ids(case, "a", "â"), FinishReason.LENGTH))
    assert event is not None
    assert (event.text, event.finish_reason, choice.num_tokens) == ("", FinishReason.STOP, 2)


def test_closing_gives_out_what_is_held(case: Case) -> None:
    choice = choice_of(case, stop=("cats",))
    cat, broken = ids(case, "Ġcat", "â")
    assert choice.take(entry(0, [cat, broken])) == ChoiceText(REQUEST, 2, 0, int32s([cat, broken]), 0, " ")
    assert choice.close() == ChoiceText(REQUEST, 2, 2, int32s(), 1, "cat�")
    assert choice.close() is None


def test_closing_a_choice_that_never_began_says_nothing(case: Case) -> None:
    assert choice_of(case).close() is None


def test_closing_a_stopped_choice_says_that_it_stopped(case: Case) -> None:
    choice = choice_of(case, stop=("the",))
    the, cat = ids(case, "the", "Ġcat")
    assert choice.take(entry(0, [the, cat])) is None
    assert choice.close() == ChoiceText(REQUEST, 2, 0, int32s([the]), 0, "", FinishReason.STOP)


def test_special_tokens_are_text_when_asked_for(case: Case) -> None:
    end = case.id_of("<|im_end|>")
    event = choice_of(case, skip=False).take(entry(0, [end]))
    assert event is not None
    assert event.text == "<|im_end|>"


def test_log_probabilities_travel_with_their_tokens_in_text_and_bytes(case: Case) -> None:
    choice = choice_of(case)
    first, second, third, the = ids(case, "â", "Ĥ", "¬", "Ġthe")
    for offset, token_id in enumerate((first, second)):
        logprobs = (TokenLogprobs(-0.5 - offset, int32s([token_id, the]), (-0.5, -2.0)),)
        assert choice.take(entry(offset, [token_id], None, logprobs)) is None
    event = choice.take(entry(2, [third], None, (TokenLogprobs(-4.0),)))
    assert event is not None
    assert event.text == "€"
    assert [position.chosen.utf8 for position in event.logprobs] == [b"\xe2", b"\x82", b"\xac"]
    assert [position.chosen.logprob for position in event.logprobs] == [-0.5, -1.5, -4.0]
    assert [(top.token, top.logprob, top.utf8) for top in event.logprobs[0].top] == [
        ("�", -0.5, b"\xe2"),
        (" the", -2.0, b" the"),
    ]


def test_log_probabilities_are_cut_with_the_tokens(case: Case) -> None:
    choice = choice_of(case, stop=("at",))
    the, cat, dog = ids(case, "the", "Ġcat", "Ġdog")
    choice.take(entry(0, [the], None, (TokenLogprobs(-1.0),)))
    logprobs = (TokenLogprobs(-1.0), TokenLogprobs(-2.0), TokenLogprobs(-3.0))
    event = choice.take(entry(0, [the, cat, dog], FinishReason.LENGTH, logprobs))
    assert event is not None
    assert list(event.token_ids) == [cat]
    assert [position.chosen.logprob for position in event.logprobs] == [-2.0]


def test_entries_without_log_probabilities_among_others_are_no_fault(case: Case) -> None:
    event = choice_of(case).take(entry(0, ids(case, "a"), None, (None,)))
    assert event is not None
    assert event.logprobs == ()


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_delivery_of_a_log_gives_the_same_text_and_tokens(case_of: CaseOf, data: st.DataObject) -> None:
    case = case_of(data.draw(st.sampled_from(["byte level", "llama"])))
    token_ids = data.draw(st.lists(st.integers(0, case.num_tokens - 1), min_size=1, max_size=30))
    stop = tuple(data.draw(st.lists(st.sampled_from(["a", "th", "e\u0142", " ", "cat", "�", "</"]), max_size=2)))
    skip = data.draw(st.booleans())
    whole = choice_of(case, stop=stop, skip=skip)
    at_once = whole.take(entry(0, token_ids, FinishReason.LENGTH))
    assert at_once is not None

    choice = choice_of(case, stop=stop, skip=skip)
    shuffle = random.Random(data.draw(st.integers(0, 1 << 30)))
    events = []
    while choice.num_tokens < len(token_ids) and not choice.is_stopped:
        start = shuffle.randint(0, choice.num_tokens)
        events.append(choice.take(entry(start, token_ids[start : start + shuffle.randint(0, 6)])))
    events.append(choice.take(entry(len(token_ids), [], FinishReason.LENGTH)))
    sent = [event for event in events if event is not None]
    assert all(event.text for event in sent[:-1])
    assert [event.finish_reason for event in sent[:-1]] == [None] * (len(sent) - 1)
    assert check_cover(sent) == (list(at_once.token_ids), at_once.text)
    assert sent[-1].finish_reason is at_once.finish_reason
    assert choice.num_tokens == whole.num_tokens == len(at_once.token_ids)
