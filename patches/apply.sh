#!/usr/bin/env bash
# Put the patch set on a Megatron-LM checkout, all of it or nothing; --reverse takes it off again.
#
#   patches/apply.sh CHECKOUT [--reverse]
#
# The tree must be clean (tracked files), and its version one that there are patches for. Nothing is committed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    printf 'apply.sh: %s\n' "$@" >&2
    exit 1
}

usage() {
    fail "usage: patches/apply.sh CHECKOUT [--reverse]"
}

[ $# -ge 1 ] && [ $# -le 2 ] || usage
checkout=$1
direction=${2:-}
[ -z "$direction" ] || [ "$direction" = --reverse ] || usage

git_there() {
    git -C "$checkout" "$@"
}

info=$checkout/megatron/core/package_info.py
[ -f "$info" ] || fail "$checkout is no Megatron-LM checkout: it has no megatron/core/package_info.py"
[ "$(cd "$checkout" && pwd -P)" = "$(git_there rev-parse --show-toplevel 2>/dev/null)" ] ||
    fail "$checkout is not the root of a git checkout, so that changes could not be told from the original"

number() { sed -n "s/^$1 = \([0-9]*\).*/\1/p" "$info"; }
version=$(number MAJOR).$(number MINOR).$(number PATCH)$(sed -n "s/^PRE_RELEASE = ['\"]\(.*\)['\"].*/\1/p" "$info")
# A tag can call itself otherwise: core_v0.19.0 says 0.19.1. So each set names the versions that it is for.
set_dir=
for series in "$here"/core_v*/series; do
    case " $(sed -n 's/^# version: //p' "$series") " in *" $version "*) set_dir=$(dirname "$series") ;; esac
done
if [ -z "$set_dir" ]; then
    known=$(cd "$here" && ls -d core_v*/ | tr -d /)
    fail "$checkout is Megatron-LM core_v$version, and there is no patch set for it." \
        "Check out one of: ${known//$'\n'/, }; or run the script by python -m megatron_patches, which says what it needs."
fi
upstream=$(sed -n 's/^# upstream: //p' "$set_dir/series")
patches=()
while read -r name; do
    patches+=("$set_dir/$name")
done < <(grep -v '^#' "$set_dir/series")

if [ -z "$direction" ]; then
    if git_there apply --reverse --check "${patches[@]}" 2>/dev/null; then
        echo "already applied: $(basename "$set_dir"), ${#patches[@]} patches (other changes of the tree were not looked at)"
        exit 0
    fi
    changed=$(git_there status --porcelain --untracked-files=no)
    [ -z "$changed" ] || fail "the tree has changes of its own; commit or stash them first:" "$changed"
fi

# Every patch is tried before any file changes; they touch different files, so each can be tried alone.
refused=
for patch in "${patches[@]}"; do
    if ! message=$(git_there apply $direction --check "$patch" 2>&1); then
        refused+="$(basename "$patch"): ${message//$'\n'/; }"$'\n'
    fi
done
[ -z "$refused" ] || fail "nothing was changed. These hunks, made against $upstream, do not fit:" "${refused%$'\n'}"

git_there apply $direction "${patches[@]}"
echo "${direction:+un}applied: $(basename "$set_dir"), ${#patches[@]} patches"
