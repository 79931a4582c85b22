#!/usr/bin/env bash
# Set-up from nothing: system packages, Python 3.12, .venv, requirements.lock, this project. Safe to repeat.
#
#   scripts/setup.sh                everything (what `make setup` runs)
#   scripts/setup.sh --system       system packages only (the part that needs root)
#   scripts/setup.sh --browser      Chromium, for the tests of the operator page only (they are skipped without it)
#   scripts/setup.sh --find-python  print the Python 3.12 that would be used, install nothing
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/.nexus-lightning
mesa_minimum=23.1  # SAPIEN refuses an older llvmpipe

say() { printf '[setup] %s\n' "$*"; }
# First line with the prefix; the others are for copying.
die() { { say "$1"; shift; (($# == 0)) || printf '%s\n' "$@"; } >&2; exit 1; }

# Network steps: three tries, since a mirror may be slow or drop one.
retry() {
    local try
    for try in 1 2 3; do
        "$@" && return 0
        say "attempt $try of 3 failed: $*" >&2
        sleep $((try * 2))
    done
    return 1
}

# ---------------------------------------------------------------------------------------------- Python 3.12
# A pyenv shim exists even when its version is not active, so a candidate counts only if it runs.
is_python312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
    local candidate
    while read -r candidate; do
        if is_python312 "$candidate"; then echo "$candidate"; break; fi
    done < <(
        type -aP python3.12 || true
        compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.12.*/bin/python3.12" || true
        compgen -G "$HOME/.pyenv/versions/3.12.*/bin/python3.12" || true
        type -aP python3 || true
        if command -v uv >/dev/null; then uv python find --no-project --system 3.12 2>/dev/null || true; fi
    )
}

# A uv for machines that have none: a private environment beside .venv.
own_uv() {
    if command -v uv; then return; fi
    command -v python3 >/dev/null || return 1
    if [[ ! -x $root/.uv/bin/uv ]]; then
        { python3 -m venv "$root/.uv" && "$root/.uv/bin/pip" install --quiet uv; } >&2 || return 1
    fi
    echo "$root/.uv/bin/uv"
}

get_python() {
    local found uv
    found=$(find_python)
    if [[ -z $found ]]; then
        say "no Python 3.12 found: trying uv" >&2
        if uv=$(own_uv) && "$uv" python install 3.12 >&2; then
            found=$("$uv" python find --no-project --system 3.12) || found=""
        fi
    fi
    if [[ -z $found ]] && has_candidate python3.12; then
        as_root apt-get install -y -q --no-install-recommends python3.12 python3.12-venv >&2
        found=$(find_python)
    fi
    [[ -n $found ]] || die "Python 3.12 is needed and was not found. Any one of these brings it:" \
        "    pyenv install 3.12" "    uv python install 3.12" "    sudo apt-get install python3.12 python3.12-venv" \
        "then run make setup again."
    echo "$found"
}

make_venv() {
    local python uv
    python=$1
    say "making .venv with $python ($("$python" -V 2>&1))"
    rm -rf "$venv"
    if "$python" -m venv "$venv" >/dev/null 2>&1; then return; fi
    rm -rf "$venv"
    if uv=$(command -v uv) && "$uv" venv --seed --python "$python" "$venv"; then return; fi
    if has_candidate python3.12-venv; then  # a Debian or Ubuntu Python without ensurepip
        as_root apt-get install -y -q --no-install-recommends python3.12-venv
        "$python" -m venv "$venv" && return
    fi
    die "$python cannot make a virtual environment (no ensurepip) and there is no uv. Type one of:" \
        "    sudo apt-get install python3.12-venv" "    pip install uv"
}

# ---------------------------------------------------------------------------------------------- system packages
# libglib2.0-0 became libglib2.0-0t64 in Debian 13 and Ubuntu 24.04.
is_installed() {
    local name
    for name in "$1" "$1t64"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) == installed ]] && return
    done
    return 1
}

has_candidate() {
    command -v apt-cache >/dev/null || return 1
    local version
    version=$(apt-cache policy "$1" | sed -n 's/^  Candidate: //p')
    [[ -n $version && $version != "(none)" ]]
}

mesa_is_new_enough() { [[ -n $1 && $1 != "(none)" ]] && dpkg --compare-versions "$1" ge "$mesa_minimum"; }

# Runs a command as root, or stops with the line to type.
as_root() {
    if [[ $(id -u) == 0 ]]; then
        DEBIAN_FRONTEND=noninteractive retry "$@"
    else
        die "root is needed for this, type:" "    sudo $*" "then run make setup again."
    fi
}

# The machine's own apt source of the release, with the suite changed to its backports (deb822 or one-line form).
# Prints the file name to use on the first line, then the content. Fails when no source of the release is found.
backports_entry() {
    local apt=$1 codename=$2 content files
    mapfile -t files < <(compgen -G "$apt/sources.list.d/*.sources")
    content=$(awk -v codename="$codename" '
        FNR == 1 { flush() }
        /^#/ { next }
        /^[[:space:]]*$/ { flush(); next }
        { stanza = stanza $0 "\n" }
        END { flush() }
        function flush(    lines, count, i, words, n, j, types, suite, off, text) {
            count = split(stanza, lines, "\n")
            stanza = ""
            for (i = 1; i < count; i++) {
                n = split(lines[i], words, /[[:space:]]+/)
                if (words[1] == "Types:") for (j = 2; j <= n; j++) if (words[j] == "deb") types = 1
                if (words[1] == "Enabled:" && words[2] == "no") off = 1
                if (words[1] == "Suites:") {
                    for (j = 2; j <= n; j++) if (words[j] == codename) suite = 1
                    lines[i] = "Suites: " codename "-backports"
                }
                if (words[1] == "Types:") lines[i] = "Types: deb"
                text = text lines[i] "\n"
            }
            if (types && suite && !off && !done) { printf "%s", text; done = 1 }
        }' /dev/null ${files[@]+"${files[@]}"})
    if [[ -n $content ]]; then
        printf 'nexus-lightning-backports.sources\n%s\n' "$content"
        return
    fi
    mapfile -t files < <(compgen -G "$apt/sources.list"; compgen -G "$apt/sources.list.d/*.list")
    content=$(sed -nE "s#^deb(([[:space:]]+\[[^]]*\])?[[:space:]]+[^[:space:]]+)[[:space:]]+$codename([[:space:]].*)\$#deb\1 $codename-backports\3#; T; p; q" /dev/null ${files[@]+"${files[@]}"})
    [[ -n $content ]] || return 1
    printf 'nexus-lightning-backports.list\n%s\n' "$content"
}

check_system() {
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        say "no apt here: install OSMesa or EGL, a Vulkan driver (Mesa llvmpipe >= $mesa_minimum) and ffmpeg by hand;"
        say "then .venv/bin/python scripts/doctor.py tells what works"
        return
    fi
    local package version missing=() mesa=()
    for package in libegl1 libgl1 libglib2.0-0 libvulkan1 ffmpeg; do
        is_installed "$package" || missing+=("$package")
    done
    is_installed libosmesa6 || mesa+=(libosmesa6)
    version=$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null || true)
    is_installed mesa-vulkan-drivers && mesa_is_new_enough "$version" || mesa+=(mesa-vulkan-drivers)
    if ((${#missing[@]} + ${#mesa[@]} == 0)); then return; fi
    say "system packages missing or too old: ${missing[*]-} ${mesa[*]-}"

    # NEXUS_APT_DIR and NEXUS_OS_RELEASE stand in for the machine's own files in tests.
    local user_lines=() entry="" file="" target=() install=(apt-get install -y -q --no-install-recommends)
    local is_root=false
    [[ $(id -u) == 0 ]] && is_root=true
    if $is_root; then as_root apt-get update -q; else user_lines+=("sudo apt-get update"); fi

    # The newest Mesa must come from where the release offers it: the release itself, or its backports (Debian 12).
    # OSMesa comes from the same place, since both depend on one Mesa version.
    version=$(apt-cache policy mesa-vulkan-drivers | sed -n 's/^  Candidate: //p')
    if ((${#mesa[@]})) && [[ -n $version ]] && ! mesa_is_new_enough "$version"; then
        local codename
        # shellcheck source=/dev/null
        codename=$(. "${NEXUS_OS_RELEASE:-/etc/os-release}" && echo "${VERSION_CODENAME:-}")
        if [[ $(apt-cache policy) != *"n=$codename-backports"* ]]; then
            entry=$(backports_entry "${NEXUS_APT_DIR:-/etc/apt}" "$codename") || die \
                "mesa-vulkan-drivers here is $version, and SAPIEN needs $mesa_minimum or newer." \
                "No apt source of $codename was found to derive $codename-backports from: add it, then run make setup again."
            file=/etc/apt/sources.list.d/${entry%%$'\n'*}
            entry=${entry#*$'\n'}
            if $is_root; then
                say "adding $codename-backports to $file"
                printf '%s\n' "$entry" >"$file"
                as_root apt-get update -q
            else
                user_lines+=("sudo tee $file >/dev/null <<'EOF'"$'\n'"$entry"$'\n'"EOF" "sudo apt-get update")
            fi
        fi
        target=(-t "$codename-backports")
    fi
    if [[ " ${mesa[*]-} " == *" libosmesa6 "* ]] && ! has_candidate libosmesa6; then
        say "this release has no libosmesa6: set MUJOCO_GL=egl"
        mesa=("${mesa[@]/libosmesa6/}")
    fi

    local packages
    if ((${#missing[@]})); then
        if $is_root; then as_root "${install[@]}" "${missing[@]}"; else user_lines+=("sudo ${install[*]} ${missing[*]}"); fi
    fi
    read -ra packages <<<"${mesa[*]-}"
    if ((${#packages[@]})); then
        if $is_root; then
            as_root "${install[@]}" ${target[@]+"${target[@]}"} "${packages[@]}"
        else
            user_lines+=("sudo ${install[*]} ${target[*]:+${target[*]} }${packages[*]}")
        fi
    fi
    $is_root || die "installing them needs root. Type:" "    sudo bash scripts/setup.sh --system" "or, line by line:" "" \
        "${user_lines[@]}" "" "then run make setup again."
}

# ---------------------------------------------------------------------------------------------- everything
stamp_text() { cat "$root/requirements.lock" "$root/scripts/setup.sh" "$root/pyproject.toml" | sha256sum | cut -d' ' -f1; }

install_all() {
    if [[ -f $stamp && $(<"$stamp") == "$(stamp_text) $root" ]] && is_python312 "$venv/bin/python"; then return; fi
    rm -f "$stamp"
    is_python312 "$venv/bin/python" || { local python; python=$(get_python); make_venv "$python"; }
    # An environment made by uv may have no pip, one made by venv has no uv.
    [[ -x $venv/bin/uv ]] || retry "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    export VIRTUAL_ENV=$venv UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-120}
    # Trust what the machine trusts (a company's proxy, say), not only uv's own list.
    [[ ! -s /etc/ssl/certs/ca-certificates.crt ]] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
    # The lock is complete, so nothing is resolved again.
    say "installing requirements.lock (several GB at first)"
    if ! retry "$venv/bin/uv" pip install --no-deps -r "$root/requirements.lock"; then
        say "uv could not install it: trying pip, which also reads pip.conf"
        "$venv/bin/python" -m pip install --no-deps -r "$root/requirements.lock"
    fi
    "$venv/bin/uv" pip install --quiet --no-deps --no-build-isolation -e "$root"
    # One import of everything heavy writes its bytecode, so that simulator processes that start together do not each
    # compile it: seconds off every one of them.
    say "first import of the large packages"
    env -u PYTHONDONTWRITEBYTECODE MUJOCO_GL="${MUJOCO_GL:-osmesa}" "$venv/bin/python" -W ignore -c \
        "import lightning, torchrl, transformers, lerobot.datasets, mani_skill.envs, libero.libero.envs" \
        </dev/null >/dev/null 2>&1 || say "an import failed: make doctor tells which and why"
    echo "$(stamp_text) $root" >"$stamp"
    say "done"
}

case ${1:-} in
    "") check_system; install_all ;;
    --system) check_system ;;
    --browser)
        [[ -x /usr/bin/chromium ]] || ! has_candidate chromium ||
            as_root apt-get install -y -q --no-install-recommends chromium >/dev/null ;;
    --find-python)
        python=$(find_python)
        [[ -n $python ]] || die "no Python 3.12 found on PATH, under pyenv or by uv"
        echo "$python" ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [[ $1 == --help || $1 == -h ]] || exit 2 ;;
esac
