# zoo in a container, with and without a GPU: docs/install.md says how to build and run it.
ARG BASE=ubuntu:24.04
FROM ${BASE}

# Extras of pyproject.toml, separated by commas. `te` needs a BASE with nvcc and cuDNN's headers.
ARG EXTRAS=""

# A compiler is needed at run time too: Triton compiles the launchers of its kernels with it.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/zoo
ENV PATH=/opt/zoo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /src
COPY pyproject.toml constraints.txt ./
# Packages have layers of their own, so that a change of zoo builds the last one alone. Versions are those of constraints.txt.
# hadolint ignore=DL3013
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > base.txt \
    && pip install -c constraints.txt -r base.txt 'setuptools>=77,<82' ninja
# Transformer Engine is compiled against the torch that is installed. Triton comes last: torch pins an older one, with which
# flash-linear-attention is wrong on Hopper.
RUN if [ -n "$EXTRAS" ]; then \
        python -c "import sys, tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*sum((extras[name] for name in sys.argv[1].split(',')), []), sep='\n')" "$EXTRAS" > extras.txt \
        && pip install --no-build-isolation -c constraints.txt -r extras.txt; \
    fi \
    && case ",$EXTRAS," in *,kernels,*) pip install 'triton>=3.7.1,<3.8' ;; esac

COPY setup.py README.md LICENSE ./
COPY zoo zoo
COPY models models
COPY bridges bridges
COPY recipes recipes
RUN pip install --no-build-isolation --no-deps .

WORKDIR /workspace
ENTRYPOINT ["zoo"]
CMD ["--help"]
