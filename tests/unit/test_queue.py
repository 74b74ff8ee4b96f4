"""What becomes of collectives that wait behind one which fails."""

import pytest

from mpizero.comm.progress import Queue, Work
from mpizero.errors import CollectiveError, CollectiveTimeoutError


class Never:
    """Be a wait that is never over, nor overdue."""

    settled = None

    def done(self):
        return False

    def overdue(self, _):
        return False

    def settle(self, _, *, finished):
        type(self).settled = finished


def works(queue, *errors):
    """Return works in a queue, each of which ends with an error or, for None, well; and which of them have begun."""
    begun = []

    def steps(number, error):
        begun.append(number)
        if error is not None:
            raise error
        if number > 1:
            yield Never()

    made = [Work(steps(number, error), number, queue) for number, error in enumerate(errors)]
    queue.jobs.extend(made)
    return made, begun


@pytest.mark.parametrize("drive", ["advance", "run_to"])
def test_what_is_behind_a_time_out_and_has_to_wait_fails_at_once(drive):
    queue = Queue()
    made, begun = works(queue, None, CollectiveTimeoutError("rank 1 is missing"), None, None)
    told = []
    for work in made:
        work.told = told.append
    queue.progress() if drive == "advance" else queue.run_to(made[-1])
    assert begun == [0, 1, 2, 3]
    assert Never.settled is False
    assert made[0].wait() == 0
    with pytest.raises(CollectiveTimeoutError):
        made[1].wait()
    for work in made[2:]:
        with pytest.raises(CollectiveError, match="was given up, which this one had to wait for: rank 1 is missing"):
            work.wait()
        assert not isinstance(work.error, CollectiveTimeoutError)
    assert [type(error) for error in told] == [type(None), CollectiveTimeoutError, CollectiveError, CollectiveError]
    assert queue.failure is made[1].error


@pytest.mark.parametrize("drive", ["advance", "run_to"])
def test_what_only_follows_a_time_out_is_done(drive):
    """As the callback of a future does."""
    queue = Queue()
    made, begun = works(queue, CollectiveTimeoutError("rank 1 is missing"), None)
    queue.progress() if drive == "advance" else queue.run_to(made[-1])
    assert begun == [0, 1]
    assert made[1].wait() == 1


def test_what_is_behind_another_error_goes_on():
    queue = Queue()
    made, begun = works(queue, ArithmeticError("of this one alone"), None)
    queue.progress()
    assert begun == [0, 1]
    assert made[1].wait() == 1
