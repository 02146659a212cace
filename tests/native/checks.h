// What the programs that check kernels share.
#pragma once
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

static std::mt19937 random_bits(24);
static const uint32_t kKey[2] = {0x12345678u, 0x9abcdef0u};

static void report(const std::string& name, long wrong) { std::printf("%s %ld\n", name.c_str(), wrong); }
