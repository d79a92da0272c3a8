#include "store/redis/redis_slots.h"

#include <gtest/gtest.h>

namespace quire {
namespace {

TEST(RedisSlots, SlotsOfTheClusterSpecification) {
  EXPECT_EQ(RedisSlotOf("123456789"), 0x31C3);
  EXPECT_EQ(RedisSlotOf("foo"), 12182);
  EXPECT_EQ(RedisSlotOf(""), 0);
  EXPECT_EQ(RedisSlotOf("{user1000}.following"), RedisSlotOf("{user1000}.followers"));
  EXPECT_EQ(RedisSlotOf("prefix{foo}suffix"), 12182);
  EXPECT_EQ(RedisSlotOf("{foo}{bar}"), 12182);
  EXPECT_NE(RedisSlotOf("foo{}{bar}"),
            RedisSlotOf("bar"));  // the first one is empty: the whole key
  EXPECT_NE(RedisSlotOf("foo{}{bar}"), RedisSlotOf(""));
  EXPECT_NE(RedisSlotOf("{}foo"), RedisSlotOf("{}bar"));
  EXPECT_EQ(RedisSlotOf("foo{{bar}}zap"), RedisSlotOf("{bar"));
  EXPECT_NE(RedisSlotOf("foo{bar"), RedisSlotOf("bar"));
}

TEST(RedisSlots, ReadsEndpoints) {
  const auto addresses = ParseRedisEndpoints("host:1,[::1]:65535,unix:/a b:c");
  ASSERT_TRUE(addresses.ok());
  ASSERT_EQ(addresses->size(), 3U);
  EXPECT_EQ((*addresses)[0], (RedisAddress{"host", 1}));
  EXPECT_EQ((*addresses)[1], (RedisAddress{"::1", 65535}));
  EXPECT_EQ((*addresses)[2], (RedisAddress{"/a b:c", 0}));
  EXPECT_EQ((*addresses)[0].ToString(), "host:1");
  EXPECT_EQ((*addresses)[1].ToString(), "[::1]:65535");
  EXPECT_EQ((*addresses)[2].ToString(), "unix:/a b:c");
  for (const char* text : {"", ",", "host", "host:", ":1", "host:0", "host:65536", "host:-1",
                           "host:1x", "unix:", "host:1,"}) {
    EXPECT_EQ(ParseRedisEndpoints(text).status().code(), StatusCode::kBadArgument) << text;
  }
}

TEST(RedisSlots, ReadsRedirections) {
  const RedisAddress asked{"10.0.0.1", 7000};
  auto moved = ParseRedirection("MOVED 3999 127.0.0.1:6381", asked);
  ASSERT_TRUE(moved);
  EXPECT_FALSE(moved->ask);
  EXPECT_EQ(moved->slot, 3999);
  EXPECT_EQ(moved->to, (RedisAddress{"127.0.0.1", 6381}));
  moved = ParseRedirection("ASK 16383 ::1:6381", asked);  // as Redis writes it
  ASSERT_TRUE(moved);
  EXPECT_TRUE(moved->ask);
  EXPECT_EQ(moved->to, (RedisAddress{"::1", 6381}));
  moved = ParseRedirection("MOVED 0 :6381", asked);  // the host that was asked
  ASSERT_TRUE(moved);
  EXPECT_EQ(moved->to, (RedisAddress{"10.0.0.1", 6381}));
  for (const char* text : {"", "MOVED", "MOVED ", "MOVED 1", "MOVED 16384 a:1", "MOVED -1 a:1",
                           "MOVED 1 a", "MOVED 1 a:0", "MOVED x a:1", "ERR MOVED 1 a:1"}) {
    EXPECT_FALSE(ParseRedirection(text, asked)) << text;
  }
}

RespValue Number(int64_t value) { return {.type = RespType::kInteger, .integer = value}; }
RespValue Text(std::string text) { return {.type = RespType::kBulk, .text = std::move(text)}; }
RespValue List(std::vector<RespValue> items) {
  return {.type = RespType::kArray, .items = std::move(items)};
}

TEST(RedisSlots, ReadsClusterSlots) {
  const RedisAddress asked{"10.0.0.1", 7000};
  const RespValue self = List({Text(""), Number(7001), Text("id")});
  const auto ranges = ParseClusterSlots(
      List({List({Number(0), Number(99), List({Text("a"), Number(1), Text("id")}), self}),
            List({Number(100), Number(16383), self})}),
      asked);
  ASSERT_TRUE(ranges.ok());
  ASSERT_EQ(ranges->size(), 2U);
  EXPECT_EQ((*ranges)[0].last, 99);
  EXPECT_EQ((*ranges)[0].master, (RedisAddress{"a", 1}));
  EXPECT_EQ((*ranges)[1].master, (RedisAddress{"10.0.0.1", 7001}));
  for (const RespValue& entry :
       {Number(1), List({}), List({Number(0), Number(1)}), List({Number(2), Number(1), self}),
        List({Number(-1), Number(1), self}), List({Number(0), Number(16384), self}),
        List({Text("0"), Number(1), self}), List({Number(0), Number(1), List({Text("a")})}),
        List({Number(0), Number(1), List({Text("a"), Number(0)})}),
        List({Number(0), Number(1), List({Text("a"), Number(65536)})})}) {
    EXPECT_EQ(ParseClusterSlots(List({entry}), asked).status().code(), StatusCode::kCorrupt);
  }
  EXPECT_EQ(ParseClusterSlots(List({}), asked).status().code(), StatusCode::kUnavailable);
  EXPECT_FALSE(ParseClusterSlots(Number(3), asked).ok());
}

}  // namespace
}  // namespace quire
