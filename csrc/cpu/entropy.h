#pragma once
#include "cpu/row.h"

namespace sk {

// sum p log(p + 1e-5) of a weighed row: Medusa's entropy (2401.10774), negative.
double negative_entropy(Row& row);

}  // namespace sk
