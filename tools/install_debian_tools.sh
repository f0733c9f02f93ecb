#!/usr/bin/env bash
# Installs the programs of Debian that tests run and no Python package has, where they are missing. Needs root.
set -euo pipefail

packages=(chromium prometheus)

missing=()
for package in "${packages[@]}"; do
    command -v "$package" > /dev/null || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
