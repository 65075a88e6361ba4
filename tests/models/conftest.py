"Models of every family, each made once in a file."

import pytest
from row_alone import CONFIGS, FAMILIES, tiny


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda n: n.split(":")[0])
def any_model(request):
    return request.param, tiny(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return tiny(request.param)
