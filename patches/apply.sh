#!/usr/bin/env bash
# Put the patch set on a Megatron-LM tree, all of it or nothing; --reverse takes it off again.
#
#   apply.sh TREE [--reverse] [--force]
#
# The tree must be a git checkout that is clean (tracked files), and its version, without what a fork appends after a
# "+", one that there are patches for. Nothing is committed. With --force it may be any folder with Megatron-LM in it,
# changed, or of another version: the newest set of which every hunk fits is taken.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    printf 'apply.sh: %s\n' "$@" >&2
    exit 1
}

usage() {
    fail "usage: apply.sh TREE [--reverse] [--force]"
}

tree='' direction='' force=''
for argument in "$@"; do
    case $argument in
        --reverse) direction=--reverse ;;
        --force) force=yes ;;
        -*) usage ;;
        *) [ -z "$tree" ] || usage; tree=$argument ;;
    esac
done
[ -n "$tree" ] || usage
info=$tree/megatron/core/package_info.py
[ -f "$info" ] || fail "$tree is no Megatron-LM checkout: it has no megatron/core/package_info.py"
tree=$(cd "$tree" && pwd -P)

# Inside another repository, git would leave out the files of this one.
git_there() {
    GIT_CEILING_DIRECTORIES=$(dirname "$tree") git -C "$tree" "$@"
}

if [ -z "$force" ] && [ "$tree" != "$(git_there rev-parse --show-toplevel 2>/dev/null)" ]; then
    fail "$tree is not the root of a git checkout, so that changes could not be told from the original" \
        "Add --force to patch it all the same."
fi

# Sets $patches: those of a set, in order.
read_series() {
    patches=()
    while read -r name; do
        patches+=("$1/$name")
    done < <(grep -v '^#' "$1/series")
}

# Every patch is tried before any file changes; they touch different files, so each can be tried alone. Sets $refused.
try() {
    refused=
    for patch in "${patches[@]}"; do
        if ! message=$(git_there apply $1 --check "$patch" 2>&1); then
            refused+="$(basename "$patch"): ${message//$'\n'/; }"$'\n'
        fi
    done
}

number() { sed -n "s/^$1 = \([0-9]*\).*/\1/p" "$info"; }
version=$(number MAJOR).$(number MINOR).$(number PATCH)$(sed -n "s/^PRE_RELEASE = ['\"]\(.*\)['\"].*/\1/p" "$info")
# A tag can call itself otherwise: core_v0.19.0 says 0.19.1. So each set names the versions that it is for.
set_dir=
for series in "$here"/core_v*/series; do
    case " $(sed -n 's/^# version: //p' "$series") " in *" ${version%%+*} "*) set_dir=$(dirname "$series") ;; esac
done
if [ -z "$set_dir" ] && [ -n "$force" ]; then
    for series in "$here"/core_v*/series; do
        read_series "$(dirname "$series")"
        for way in '' --reverse; do # a set that is on the tree fits in reverse
            try "$way"
            [ -n "$refused" ] || set_dir=$(dirname "$series")
        done
    done
    [ -z "$set_dir" ] || echo "$tree is Megatron-LM core_v$version, which was not tested: run it with --resharding-allow-version"
fi
if [ -z "$set_dir" ]; then
    known=$(cd "$here" && ls -d core_v*/ | tr -d /)
    hint="If it is a fork of one of them, add --force: the set whose hunks fit is taken."
    [ -z "$force" ] || hint=
    fail "$tree is Megatron-LM core_v$version, and there is no patch set for it${force:+ that fits}." \
        "Check out one of: ${known//$'\n'/, }; or run the script by python -m megatron_patches, which says what it needs." \
        ${hint:+"$hint"}
fi
upstream=$(sed -n 's/^# upstream: //p' "$set_dir/series")
read_series "$set_dir"

if [ -z "$direction" ]; then
    if git_there apply --reverse --check "${patches[@]}" 2>/dev/null; then
        echo "already applied: $(basename "$set_dir"), ${#patches[@]} patches (other changes of the tree were not looked at)"
        exit 0
    fi
    if [ -z "$force" ]; then
        changed=$(git_there status --porcelain --untracked-files=no)
        [ -z "$changed" ] || fail "the tree has changes of its own; commit or stash them first, or add --force:" "$changed"
    fi
fi
try "$direction"
[ -z "$refused" ] || fail "nothing was changed. These hunks, made against $upstream, do not fit:" "${refused%$'\n'}"

git_there apply $direction "${patches[@]}"
echo "${direction:+un}applied: $(basename "$set_dir"), ${#patches[@]} patches"
