"""Every FFI target of the CPU called with what it must refuse, past the Python layer: an error that names
something, never a crash."""

import pytest

from tests.native.outcomes import check, outcomes

pytestmark = pytest.mark.slow


def test_targets_of_the_cpu(caller):
    check(outcomes(caller), least=8600)
