// Text for people and goldens, put together piece by piece.
#ifndef QUIRE_KV_PAGES_TEXT_H_
#define QUIRE_KV_PAGES_TEXT_H_

#include <concepts>
#include <string>
#include <string_view>

namespace quire {

// Not a std::ostringstream: that swallows std::bad_alloc and goes on with half a text.
class Text {
 public:
  Text& operator<<(std::string_view piece) {
    text_ += piece;
    return *this;
  }
  template <std::integral T>
  Text& operator<<(T number) {
    text_ += std::to_string(number);
    return *this;
  }
  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_TEXT_H_
