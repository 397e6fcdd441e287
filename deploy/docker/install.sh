#!/bin/sh
# install.sh EXTRA...: the packages that these extras need, into the environment of an image, at constraints.txt's versions.
# Wheels in /wheels go first; pip's own variables (PIP_NO_INDEX, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL) do the rest.
set -eu
for variable in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_NO_INDEX; do
    eval "[ -n \"\${$variable:-}\" ]" || unset "$variable"   # an empty one means something else to pip
done
/usr/local/bin/python3 requirements.py "$@" > requirements.txt
/usr/local/bin/python3 -m pip --python /opt/shoal/bin/python --disable-pip-version-check --no-cache-dir install --quiet \
    --only-binary :all: --find-links /wheels --constraint constraints.txt --requirement requirements.txt
/usr/local/bin/python3 metadata.py "$(/opt/shoal/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Tests that packages bring along, and C sources, are not for images.
find /opt/shoal/lib -type d -name tests -prune -exec rm -rf {} +
find /opt/shoal/lib -type d -name __pycache__ -prune -exec rm -rf {} +
