#include "chunk/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace quire {
namespace {

std::string HashOf(std::string_view text) { return Sha256().Update(text).Finish().ToHex(); }

// FIPS 180-4's examples, and the lengths around the padding's change of block, whose values are
// those of two independent implementations (OpenSSL, Python's hashlib).
TEST(Sha256, KnownValues) {
  EXPECT_EQ(HashOf(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HashOf("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HashOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(HashOf(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(HashOf(std::string(55, 'a')),
            "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(HashOf(std::string(56, 'a')),
            "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(HashOf(std::string(63, 'a')),
            "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34");
  EXPECT_EQ(HashOf(std::string(64, 'a')),
            "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

TEST(Sha256, PartsAddUp) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += static_cast<char>(i);
  const std::string whole = HashOf(text);
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    const std::string_view view(text);
    Sha256 hash;
    hash.Update(view.substr(0, cut)).Update(view.substr(cut));
    ASSERT_EQ(hash.Finish().ToHex(), whole) << cut;
  }
}

std::string MacOf(std::string_view key, std::string_view text) {
  HmacSha256 mac(key);
  mac.Update(std::as_bytes(std::span(text.data(), text.size())));
  return mac.Finish().ToHex();
}

// RFC 4231: cases 1, 2 and 6 (a key longer than a block).
TEST(HmacSha256, KnownValues) {
  EXPECT_EQ(MacOf(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(MacOf("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(MacOf(std::string(64, 'a'), "key of a block"),  // it is not hashed
            "e5e0b47357bb122a8dd12905a1348e96dd381e6a01534f1d91e1132015ada9ac");
  EXPECT_EQ(
      MacOf(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(EqualInConstantTime, SeesEveryBit) {
  const Digest digest = Sha256().Update("x").Finish();
  EXPECT_TRUE(EqualInConstantTime(digest, digest));
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest other = digest;
    other.bytes[bit / 8] = static_cast<uint8_t>(other.bytes[bit / 8] ^ 1 << bit % 8);
    EXPECT_FALSE(EqualInConstantTime(digest, other)) << bit;
  }
}

}  // namespace
}  // namespace quire
