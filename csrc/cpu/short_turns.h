// Tells the scheduler that the calling thread needs a core for moments only, but then at once.
#pragma once

namespace sk {

// Every thread gets the same share of a core. One that asks for turns of 0.1 ms in place of about 3 ms gets them sooner:
// its deadline comes before that of a thread that computes, so it goes on as soon as it is woken (Linux 6.12 and later,
// "Earliest Eligible Virtual Deadline First", Stoica and Abdel-Wahab 1995; needs no privilege). Returns whether the
// system took it; older ones ignore the wish.
bool short_turns();

}  // namespace sk
